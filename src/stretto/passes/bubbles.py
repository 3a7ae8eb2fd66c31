"""Where a rank has nothing to run: the idle rounds of a walk through the schedule."""

from __future__ import annotations

from collections import Counter

from stretto.ir.action import COMPUTE, Overlap
from stretto.ir.schedule import Schedule, compute_only
from stretto.ir.walk import walk


def bubble_slots(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each rank its idle rounds, each as the number of compute items that come before it.

    In rounds in which every rank that can runs one item, 1F1B and GPipe leave every rank
    2p - 2 rounds idle: r before its first forward, 2(p - 1 - r) between its first forward and
    its last backward, and r after it.

    Example:
        >>> from stretto.ir.text import parse_orders
        >>> bubble_slots(parse_orders("0F0 0B0\\n1F0 1B0"))
        ((1, 1), (0, 2))
    """
    order = compute_only(schedule)
    visits = walk(order).visits
    rounds = range(max((visit.round for visit in visits), default=-1) + 1)
    busy: list[Counter[int]] = [Counter() for _ in order.ranks]
    for visit in visits:
        item = order.ranks[visit.rank][visit.position]
        if isinstance(item, Overlap) or item.kind in COMPUTE:
            busy[visit.rank][visit.round] += 1
    slots: list[tuple[int, ...]] = []
    for mine in busy:
        done = 0
        idle: list[int] = []
        for index in rounds:
            done += mine[index]
            if not mine[index]:
                idle.append(done)
        slots.append(tuple(idle))
    return tuple(slots)
