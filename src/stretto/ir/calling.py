"""How a value is handed to a stage or a layer: the one calling rule.

A plain tuple becomes positional arguments, a dict becomes keywords, anything else is one argument
(a list or a named tuple too). Extras, the values every stage may read, go only to callables that
name them. The runtime calls stages and stages call layers by this rule; it needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

STAGE_EXTRAS = "stage_extras"
"""A callable with a parameter of this name gets the extras there as one mapping, unfiltered."""


@dataclass(frozen=True, slots=True)
class WithSkips:
    """What a stage (or layer) returns if later ones use more of it than its output.

    Args:
        output: The output for the next stage.
        skips: Named values for later stages; any nesting, as between neighbours.
    """

    output: Any
    skips: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a callable can be given.

    Args:
        positional: Names that positional arguments fill, in order.
        keywords: Names that can be given as keywords; None if any can.
        takes_extras: Whether there is a parameter for all extras together (`STAGE_EXTRAS`).
    """

    positional: tuple[str, ...]
    keywords: frozenset[str] | None
    takes_extras: bool = False

    def arguments(
        self, value: Any, extras: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a value and those extras that are accepted.

        A name that the value fills, by position or by keyword, is not filled from the extras.
        """
        args, keywords = spread(value)
        if self.takes_extras:
            return args, {**keywords, STAGE_EXTRAS: extras}
        filled = self.positional[: len(args)]
        chosen = {
            name: extra
            for name, extra in extras.items()
            if (self.keywords is None or name in self.keywords) and name not in filled
        }
        return args, {**chosen, **keywords}


def spread(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that a value stands for.

    Example:
        >>> spread((1, 2)), spread({"a": 1}), spread([1, 2])
        (((1, 2), {}), ((), {'a': 1}), (([1, 2],), {}))
    """
    if type(value) is tuple:
        return cast("tuple[Any, ...]", value), {}
    if isinstance(value, dict):
        return (), cast("dict[str, Any]", value)
    return (value,), {}


def gather(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A value that `spread` turns into these arguments; not for a mix of both.

    Example:
        >>> gather((1,), {}), gather((1, 2), {}), gather((), {"a": 1})
        (1, (1, 2), {'a': 1})
    """
    if keywords and not args:
        return keywords
    return args[0] if len(args) == 1 else args


def parameters_of(target: Callable[..., Any]) -> Parameters:
    """Read a callable's signature; of a module (anything with `forward`), that of `forward`.

    A callable without a readable signature, as some built-in functions, accepts no keywords.
    Cost: some 10 microseconds, so ask once and keep the answer.
    """
    function = getattr(target, "forward", target)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Parameters((), frozenset())
    kinds = inspect.Parameter
    by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    by_keyword = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    takes_all = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
    named = frozenset(each.name for each in parameters if each.kind in by_keyword)
    return Parameters(
        positional=tuple(each.name for each in parameters if each.kind in by_position),
        keywords=None if takes_all else named,
        takes_extras=STAGE_EXTRAS in named,
    )


def accepted_keywords(target: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keywords a callable (or a module's `forward`) accepts; None if it takes all."""
    return parameters_of(target).keywords
