"""The lowering every part of stretto agrees on: pairs split, transfers, frees."""

from __future__ import annotations

from stretto.ir.action import FREES, Action
from stretto.ir.schedule import Schedule, split_overlaps
from stretto.passes.add_comms import add_comms
from stretto.passes.add_frees import add_frees


def lower(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """The program the engine runs for this schedule.

    Pairs become their halves, so that the forward's output leaves before the backward starts.
    Transfers and frees that the schedule has already stay where they are.

    Args:
        schedule: Lowered or not.
        ahead: By how many compute items receives are posted ahead, see `add_comms`. With 1 the
            program ends wherever every channel is a stream of its own; for channels that share
            communicators, `verify.lower_for` finds what they allow.
    """
    schedule = split_overlaps(schedule)
    if not schedule.is_lowered:
        schedule = add_comms(schedule, ahead=ahead)
    has_frees = any(
        isinstance(item, Action) and item.kind in FREES
        for order in schedule.ranks
        for item in order
    )
    return schedule if has_frees else add_frees(schedule)
