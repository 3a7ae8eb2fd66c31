"""Adds the frees: what was sent is given up as soon as its transfer lets go of it.

A FREE stands right after the SEND of its value. It does not wait: it tells the runtime that this
rank will not touch the value again, so that the memory goes when the message has left. What
stays on the rank (an edge between two of its own stages) is held by its consumer and needs none.
"""

from __future__ import annotations

from stretto.errors import InputError
from stretto.ir.action import FREES, Action, AnyAction, Kind
from stretto.ir.schedule import Schedule

_FREE_AFTER = {Kind.SEND_F: Kind.FREE_F, Kind.SEND_B: Kind.FREE_B}


def add_frees(schedule: Schedule) -> Schedule:
    """Insert FREE_F and FREE_B behind the sends.

    Args:
        schedule: A schedule with transfers and without frees.

    Raises:
        InputError: the schedule has frees already.
    """
    return schedule.with_ranks(tuple(_add(order) for order in schedule.ranks))


def _add(order: tuple[AnyAction, ...]) -> tuple[AnyAction, ...]:
    result: list[AnyAction] = []
    for item in order:
        if isinstance(item, Action) and item.kind in FREES:
            raise InputError(f"add_frees: the schedule has {item} already")
        result.append(item)
        if isinstance(item, Action) and item.kind in _FREE_AFTER:
            result.append(Action(item.stage, _FREE_AFTER[item.kind], item.microbatch, item.peer))
    return tuple(result)
