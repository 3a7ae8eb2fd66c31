"""Skip connections: which stage makes a named value, and which stages use it.

A stage module says so itself: `skip_outputs` and `skip_inputs` are tuples of names. It returns
`WithSkips(output, {name: value})` and gets what it uses as keyword arguments. The engine collects
the names of all ranks into one table, from which the schedule gets its edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import InputError
from stretto.ir import Skip


@dataclass(frozen=True, slots=True)
class SkipTable:
    """Name → the stage that makes it and the stages that use it, ascending."""

    routes: Mapping[str, tuple[int, tuple[int, ...]]]

    def edges(self) -> tuple[Skip, ...]:
        """The schedule's skip connections, each set of stages once."""
        unique = sorted(set(self.routes.values()))
        return tuple(Skip(source=source, targets=targets) for source, targets in unique)

    def sent(self, source: int, target: int) -> list[str]:
        """The names that go straight from one stage to another."""
        return [
            name
            for name, (made, used) in sorted(self.routes.items())
            if made == source and target in used
        ]

    def returned(self, high: int, low: int) -> list[str]:
        """The names whose gradient goes from one stage to an earlier one of its chain."""
        return [
            name
            for name, (made, used) in sorted(self.routes.items())
            if (low, high) in zip((made, *used), used, strict=False)
        ]


def declared_skips(module: Any) -> Mapping[str, Sequence[str]]:
    """What a stage module says it makes and uses."""
    made, used = (
        list(getattr(module, attribute, ())) for attribute in ("skip_outputs", "skip_inputs")
    )
    return {"makes": made, "uses": used}


def skip_table(declared: Mapping[int, Mapping[str, Sequence[str]]], num_stages: int) -> SkipTable:
    """Put together what all stages declare.

    Args:
        declared: Stage → `declared_skips` of its module, of every stage.
        num_stages: Number of stages.

    Raises:
        InputError: a used name is made by no earlier stage, or a name is made twice.
    """
    makers: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    for stage in range(num_stages):
        for name in declared[stage]["makes"]:
            if name in makers:
                raise InputError(
                    f"skip value {name!r} is made by stages {makers[name]} and {stage}; a name has "
                    "one maker"
                )
            makers[name] = stage
        for name in declared[stage]["uses"]:
            users.setdefault(name, []).append(stage)
    for name, stages in users.items():
        if name not in makers or makers[name] >= stages[0]:
            made = f"stage {makers[name]} makes it" if name in makers else "no stage makes it"
            raise InputError(
                f"stage {stages[0]} uses the skip value {name!r}, but {made}; it must come from an "
                "earlier stage"
            )
    return SkipTable({name: (makers[name], tuple(used)) for name, used in users.items()})
