"""Does every action come after what it needs on its own rank?"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.action import Action, AnyAction, halves
from stretto.ir.deps import Value, describe_value, gives
from stretto.ir.schedule import Schedule
from stretto.ir.walk import item_needs
from stretto.verify.violation import Rule, Violation


def find_disorder(schedule: Schedule, *, lowered: bool = False) -> Iterator[Violation]:
    """Actions before what gives their values on the same rank, or without it.

    What comes from other ranks is left to the transfers and the deadlock check.
    """
    for rank, order in enumerate(schedule.ranks):
        giver_of: dict[Value, tuple[int, AnyAction]] = {}
        for position, item in enumerate(order):
            for action in halves(item):
                for value in gives(action, schedule.skips):
                    giver_of.setdefault(value, (position, action))
        for position, item in enumerate(order):
            for value in item_needs(item, schedule):
                giver = giver_of.get(value)
                if giver is not None and giver[0] < position:
                    continue
                if giver is None and not _must_be_local(value, schedule, rank, lowered):
                    continue
                yield _disorder(rank, position, item, value, giver, lowered)


def _must_be_local(value: Value, schedule: Schedule, rank: int, lowered: bool) -> bool:
    if lowered:
        return True
    return schedule.rank_of(value.stage, value.microbatch) == rank


def _disorder(
    rank: int,
    position: int,
    item: AnyAction,
    value: Value,
    giver: tuple[int, AnyAction] | None,
    lowered: bool,
) -> Violation:
    if giver is None:
        problem = f"needs {describe_value(value)}, which nothing on this rank gives"
        remedy = "add what gives it, before"
    else:
        where = f"{giver[1]} is at position {giver[0]}"
        inside = giver[0] == position
        problem = f"and {giver[1]} are one pair" if inside else f"before {giver[1]}"
        remedy = f"both halves must be ready when a pair starts: {where}" if inside else where
    return Violation(
        rule=Rule.ORDER,
        rank=rank,
        position=position,
        action=str(item),
        problem=problem,
        remedy=remedy,
        lowered=lowered,
    )


def positions(order: tuple[AnyAction, ...]) -> dict[Action, int]:
    """Where each single action stands first."""
    found: dict[Action, int] = {}
    for position, item in enumerate(order):
        for action in halves(item):
            if isinstance(action, Action):
                found.setdefault(action, position)
    return found
