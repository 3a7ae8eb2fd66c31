"""From a generator's name and options, as a command line or a file gives them, to its schedule."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping

from stretto.errors import InputError
from stretto.ir import Schedule
from stretto.schedules.gpipe import gpipe
from stretto.schedules.interleaved_1f1b import interleaved_1f1b
from stretto.schedules.looped_bfs import looped_bfs
from stretto.schedules.one_f_one_b import one_f_one_b

GENERATORS: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
}

_ALSO_CALLED = {"1f1b": "one_f_one_b"}  # too far from the name for a comparison of letters


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: int) -> Schedule:
    """The schedule of the named generator.

    Args:
        name: A key of `GENERATORS`.
        num_ranks: Ranks, at least 1.
        num_microbatches: Microbatches of a step, at least 1.
        options: What else the generator takes, such as `stages_per_rank`.

    Raises:
        InputError: no generator has this name, it does not take an option, lacks one, or the
            numbers do not suit it.

    Example:
        >>> build("one_f_one_b", num_ranks=2, num_microbatches=2).ranks[1]
        (Action(stage=1, kind=F, microbatch=0), Action(stage=1, kind=B, microbatch=0), \
Action(stage=1, kind=F, microbatch=1), Action(stage=1, kind=B, microbatch=1))
    """
    if name not in GENERATORS:
        raise InputError(f"no schedule is called {name!r}{_meant(name)}; known: {_names()}")
    generator = GENERATORS[name]
    taken = [one for one in inspect.signature(generator).parameters if one not in _COMMON]
    for option, value in options.items():
        if option not in taken:
            raise InputError(f"{name} takes no {option} (it is {value!r}); {_remedy(option)}")
    for option in taken:
        if option not in options:
            raise InputError(f"{name} needs {option}; give a whole number of at least 1")
    return generator(num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


_COMMON = ("num_ranks", "num_microbatches")


def _names() -> str:
    return ", ".join(GENERATORS)


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name.lower().replace("-", "_"), GENERATORS, n=1)
    guess = _ALSO_CALLED.get(name.lower(), close[0] if close else None)
    return "" if guess is None else f" (did you mean {guess!r}?)"


def _remedy(option: str) -> str:
    takers = [
        name
        for name, generator in GENERATORS.items()
        if option in inspect.signature(generator).parameters
    ]
    return f"leave it out, or take {' or '.join(takers)}" if takers else "no schedule takes it"
