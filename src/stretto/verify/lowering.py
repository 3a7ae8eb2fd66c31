"""Lowering for channels that share communicators: receives as far ahead as is proved."""

from __future__ import annotations

from stretto.ir.communicators import Communicators
from stretto.ir.schedule import Schedule
from stretto.passes import lower
from stretto.verify.deadlock import find_deadlock
from stretto.verify.violation import Transport


def lower_for(
    schedule: Schedule,
    communicators: Communicators = Communicators.PER_DIRECTION,
    *,
    batched: bool = True,
) -> Schedule:
    """The program for these communicators, with receives posted one compute item ahead if it ends.

    A receive that is posted ahead stands, in a queue it shares, before sends that it once stood
    behind, and ranks may come to wait in a circle. So posting ahead is tried and proved, and
    otherwise left out, which is right for every way of sharing: without it all transfers have
    one order, that of production, which every rank follows. Take the first transfer in it that
    is not over. All that its two ranks run before it is over, so both have posted its unit; units
    and transfers in front of it come earlier in the order and are over, so at both ends nothing
    holds it up. It does not matter which transfers make a unit, because those behind it in its
    unit do not hold it up either.

    Args:
        schedule: The schedule; one that is lowered stays as it is.
        communicators: Which channels share a communicator.
        batched: Whether the transfers between two compute actions are one unit, or each its own.

    Raises:
        ScheduleError: the orders wait for each other in a circle, or for what nobody produces.

    Cost: that of `lower`, and of proving the program once.
    """
    program = lower(schedule)
    if schedule.is_lowered:
        return program
    if not find_deadlock(program, Transport.NCCL, communicators, batched=batched):
        return program
    return lower(schedule, ahead=0)
