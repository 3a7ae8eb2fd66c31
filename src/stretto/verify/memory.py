"""How much a rank holds at the most: a matter of its order alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.errors import InputError
from stretto.ir.action import Action, Kind, halves
from stretto.ir.costs import Costs, Number, check_stage_count, per_stage
from stretto.ir.schedule import Schedule
from stretto.verify.violation import Rule, Violation

MemoryLimit = Number | Sequence[Number]


def peak_memory(schedule: Schedule, costs: Costs | None = None) -> tuple[Number, ...]:
    """The most each rank holds.

    Args:
        schedule: Lowered or not; pairs count as their halves.
        costs: Without them one per stage and microbatch, from the start of F to the end of B (or
            W). With them `held_bytes` from the start of F to the end of I (or B), and
            `deferred_bytes` from the end of I to the end of W.

    Raises:
        InputError: the costs are for another number of stages.

    Example:
        >>> from stretto.ir.text import parse_orders
        >>> peak_memory(parse_orders("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"))
        (2, 1)
    """
    return tuple(
        max((amount for _, _, amount in _held(schedule, rank, costs)), default=0)
        for rank in range(schedule.num_ranks)
    )


def find_excess(schedule: Schedule, costs: Costs | None, limit: MemoryLimit) -> Iterator[Violation]:
    """Ranks that hold more than their limit, at the first action where they do."""
    limits = _limits(limit, schedule.num_ranks)
    for rank, most in enumerate(limits):
        held = list(_held(schedule, rank, costs))
        over = next((one for one in held if one[2] > most), None)
        if over is not None:
            position, action, amount = over
            peak = max(amount for _, _, amount in held)
            yield Violation(
                rule=Rule.MEMORY,
                rank=rank,
                position=position,
                action=str(action),
                problem=f"makes the rank hold {amount}; its limit is {most}",
                remedy=f"the peak of this rank is {peak}; run backwards earlier, or allow {peak}",
            )


def _limits(limit: MemoryLimit, num_ranks: int) -> tuple[Number, ...]:
    if not isinstance(limit, Sequence):
        return (limit,) * num_ranks
    if len(limit) != num_ranks:
        raise InputError(f"memory has {len(limit)} limits for {num_ranks} ranks; give one each")
    return tuple(limit)


def _held(
    schedule: Schedule, rank: int, costs: Costs | None
) -> Iterator[tuple[int, Action, Number]]:
    """Position, action and what is held while the action runs."""
    held_of, deferred_of = _amounts(schedule, costs)
    amount: Number = 0
    for position, item in enumerate(schedule.ranks[rank]):
        for action in halves(item):
            if not isinstance(action, Action):
                continue
            if action.kind is Kind.F:
                amount += held_of[action.stage]
            yield position, action, amount
            if action.kind is Kind.B:
                amount -= held_of[action.stage]
            elif action.kind is Kind.I:
                amount += deferred_of[action.stage] - held_of[action.stage]
            elif action.kind is Kind.W:
                amount -= deferred_of[action.stage]


def _amounts(
    schedule: Schedule, costs: Costs | None
) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    count = schedule.num_stages
    if costs is None:
        return (1,) * count, (1,) * count
    check_stage_count(costs, count)
    return per_stage(costs.held_bytes, count, 0), per_stage(costs.deferred_bytes, count, 0)
