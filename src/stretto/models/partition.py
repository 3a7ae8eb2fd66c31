"""How many layers each stage gets.

Arithmetic only: numbers and names in, one count per stage out. Every function here gives a tuple
with a count per stage whose sum is the number of layers; stages are consecutive slices, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from stretto.errors import InputError

Rule = Callable[[Sequence[str], int], Sequence[int]]
"""Class names of all layers and the number of stages → layers per stage."""

By = str | Sequence[int] | Rule
"""`"even"`, `"uniform_late"`, `"class:PATTERN"`, counts, or a rule (`by_starts` and the like)."""


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The quotient everywhere, the remainder one each to the middle stages.

    The outer stages hold embedding and head as a rule, so they get no more than they must.

    Example:
        >>> even(10, 4), even(7, 3)
        ((2, 3, 3, 2), (2, 3, 2))
    """
    _enough(num_layers, num_stages)
    quotient, remainder = divmod(num_layers, num_stages)
    first = num_stages // 2 - remainder // 2
    return tuple(quotient + (first <= stage < first + remainder) for stage in range(num_stages))


def uniform_late(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The quotient everywhere, the remainder one each to the last stages.

    Example:
        >>> uniform_late(10, 4)
        (2, 2, 3, 3)
    """
    _enough(num_layers, num_stages)
    quotient, remainder = divmod(num_layers, num_stages)
    return tuple(quotient + (stage >= num_stages - remainder) for stage in range(num_stages))


def counts(given: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage as given, checked; a stage may have none if its count says so.

    Raises:
        InputError: wrong length, wrong sum, or a negative count.
    """
    if len(given) != num_stages:
        raise InputError(
            f"{len(given)} layer counts {list(given)} for {num_stages} stages; give one per stage"
        )
    for stage, count in enumerate(given):
        if count < 0:
            raise InputError(f"stage {stage} is given {count} layers; a count is 0 or more")
    if sum(given) != num_layers:
        raise InputError(
            f"layer counts {list(given)} add up to {sum(given)}; the model has {num_layers} layers"
        )
    return tuple(given)


def starts(given: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage from the first layer of each stage.

    Raises:
        InputError: wrong length, not starting at 0, descending, or past the last layer.

    Example:
        >>> starts([0, 3, 4], 6, 3)
        (3, 1, 2)
    """
    if len(given) != num_stages:
        raise InputError(
            f"{len(given)} stage starts {list(given)} for {num_stages} stages; give one per stage"
        )
    edges = [*given, num_layers]
    if edges[0] != 0 or any(later < earlier for earlier, later in pairwise(edges)):
        raise InputError(
            f"stage starts {list(given)} must begin with 0 and rise to at most {num_layers}, "
            "the number of layers"
        )
    return tuple(later - earlier for earlier, later in pairwise(edges))


def at_class(names: Sequence[str], pattern: str, num_stages: int) -> tuple[int, ...]:
    """Divide the layers whose class name matches evenly; the others stay where they stand.

    Every stage but the first starts at a matching layer: what precedes the first match goes to
    the first stage, what follows a match goes with it.

    Args:
        names: Class name of every layer.
        pattern: Regular expression for the whole name.
        num_stages: Number of stages.

    Raises:
        InputError: the pattern is not one, or matches fewer layers than there are stages.

    Example:
        >>> at_class(["Embed", "Block", "Norm", "Block", "Head"], "Block", 2)
        (3, 2)
    """
    try:
        matches = [index for index, name in enumerate(names) if re.fullmatch(pattern, name)]
    except re.error as error:
        raise InputError(
            f"class pattern {pattern!r} is not a regular expression: {error}"
        ) from None
    if len(matches) < num_stages:
        raise InputError(
            f"class pattern {pattern!r} matches {len(matches)} layers for {num_stages} stages; "
            f"it must match one per stage; the classes are {', '.join(dict.fromkeys(names))}"
        )
    first_matches = accumulate(even(len(matches), num_stages)[:-1])
    return starts([0, *(matches[each] for each in first_matches)], len(names), num_stages)


def weighted(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The split whose heaviest stage is as light as can be; no stage is empty.

    Among the best, stages are kept alike (least sum of squares, as far as one pass finds it).
    Exact for integers and fractions. Cost: stages x layers squared.

    Raises:
        InputError: a negative weight, or fewer layers than stages.

    Example:
        >>> weighted([1, 1, 1, 5, 1, 1], 3)
        (3, 1, 2)
    """
    _enough(len(weights), num_stages)
    for layer, weight in enumerate(weights):
        if not weight >= 0:
            raise InputError(f"layer {layer} has weight {weight}; a weight is 0 or more")
    prefix = [0, *accumulate(weights)]
    # best[i] = (heaviest stage, sum of squares, counts) of the first i layers in k stages
    best = {i: (prefix[i], prefix[i] ** 2, (i,)) for i in range(1, len(prefix))}
    for _ in range(1, num_stages):
        best = {
            i: min(
                (
                    max(best[j][0], prefix[i] - prefix[j]),
                    best[j][1] + (prefix[i] - prefix[j]) ** 2,
                    (*best[j][2], i - j),
                )
                for j in best
                if j < i
            )
            for i in range(min(best) + 1, len(prefix))
        }
    return best[len(weights)][2]


def by_starts(given: Sequence[int]) -> Rule:
    """Split at given layers: the first layer of each stage."""
    return lambda names, num_stages: starts(given, len(names), num_stages)


def by_class(pattern: str) -> Rule:
    """Split before layers whose class name matches, with as many matches in every stage."""
    return lambda names, num_stages: at_class(names, pattern, num_stages)


def by_weights(weights: Sequence[float]) -> Rule:
    """Split so that the heaviest stage is as light as can be; one weight per layer."""

    def rule(names: Sequence[str], num_stages: int) -> tuple[int, ...]:
        if len(weights) != len(names):
            raise InputError(f"{len(weights)} weights for {len(names)} layers; give one per layer")
        return weighted(weights, num_stages)

    return rule


def layers_per_stage(by: By, names: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Apply a way of splitting to layers with these class names.

    Raises:
        InputError: the way is unknown, or does not fit the layers and stages.
    """
    if isinstance(by, str):
        if by.startswith("class:"):
            return at_class(names, by.removeprefix("class:"), num_stages)
        named = {"even": even, "uniform_late": uniform_late}
        if by not in named:
            raise InputError(
                f"split by {by!r} is unknown; it is 'even', 'uniform_late', 'class:PATTERN', "
                "a list of counts or a rule"
            )
        return named[by](len(names), num_stages)
    given = by if isinstance(by, Sequence) else by(names, num_stages)
    return counts(given, len(names), num_stages)


def _enough(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise InputError(f"{num_stages} stages; a split needs at least 1")
    if num_layers < num_stages:
        raise InputError(
            f"{num_layers} layers are too few for {num_stages} stages; every stage needs one, "
            "unless counts are given"
        )
