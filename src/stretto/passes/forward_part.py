"""The forward part of a schedule, for any number of microbatches: what an evaluation runs.

Placement and replicas stay, the order is made anew. Microbatches go through in groups of p: on
every rank a group passes one stage before the next one, so that a rank with several stages does
not wait for the first microbatch to come round. All ranks follow the same total order (group,
stage, microbatch), in which every stage comes after the one before it, so none waits in a circle.
"""

from __future__ import annotations

from stretto.errors import InputError
from stretto.ir.action import Action, Kind
from stretto.ir.schedule import Schedule


def forward_part(schedule: Schedule, num_microbatches: int | None = None) -> Schedule:
    """Every forward of every stage, and nothing else.

    With p = 2, two stages per rank and 3 microbatches:

        rank 0   0F0 0F1 2F0 2F1 0F2 2F2
        rank 1   1F0 1F1 3F0 3F1 1F2 3F2

    Args:
        schedule: The training schedule; its placement is kept.
        num_microbatches: How many microbatches; by default as many as in the schedule.

    Raises:
        InputError: `num_microbatches` is below 1.
    """
    count = schedule.num_microbatches if num_microbatches is None else num_microbatches
    if count < 1:
        raise InputError(f"num_microbatches is {count}; an evaluation needs at least 1")
    routes: tuple[int, ...] = ()
    if schedule.placement.num_replicas > 1:
        routes = tuple(index % schedule.placement.num_replicas for index in range(count))
    empty = Schedule(
        placement=schedule.placement,
        num_microbatches=count,
        ranks=((),) * schedule.num_ranks,
        replica_of_microbatch=routes,
        skips=schedule.skips,
    )
    orders: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    for start in range(0, count, schedule.num_ranks):
        group = range(start, min(start + schedule.num_ranks, count))
        for stage in range(schedule.num_stages):
            for microbatch in group:
                rank = empty.rank_of(stage, microbatch)
                orders[rank].append(Action(stage, Kind.F, microbatch))
    return empty.with_ranks(tuple(tuple(order) for order in orders))
