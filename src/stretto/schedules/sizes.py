"""The check of a generator's numbers."""

from __future__ import annotations

from stretto.errors import InputError


def check_sizes(generator: str, **sizes: object) -> None:
    """Refuse a size that is not a whole number of at least 1.

    Args:
        generator: The generator's name, for the message.
        sizes: The sizes by the name of their parameter.

    Raises:
        InputError: names generator, size and value.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(
                f"{generator}: {name} is {value!r}; it must be a whole number of at least 1"
            )
