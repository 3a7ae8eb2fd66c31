"""The forward part of a schedule, for any number of microbatches: what an evaluation runs.

Placement and skips stay, the order is made anew: every rank runs what has arrived, its highest
stage first, so that what is on its way gets through before more is let in. On a loop of p ranks
this sends microbatches round in groups of p, on a V it fills the way back; no rank waits while
it could work, and none in a circle, because the orders are those of a run that took place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.errors import InputError
from stretto.ir.action import Action, Kind
from stretto.ir.arrival import HasArrived, order_by_arrival
from stretto.ir.schedule import Schedule


def forward_part(schedule: Schedule, num_microbatches: int | None = None) -> Schedule:
    """Every forward of every stage, and nothing else.

    With p = 2, two stages per rank and 3 microbatches:

        rank 0   0F0 0F1 2F0 2F1 0F2 2F2
        rank 1   1F0 1F1 3F0 3F1 1F2 3F2

    Args:
        schedule: The training schedule; its placement is kept.
        num_microbatches: How many microbatches; by default as many as in the schedule. Of
            several replicas each gets its turn.

    Raises:
        InputError: `num_microbatches` is below 1.
    """
    count = schedule.num_microbatches if num_microbatches is None else num_microbatches
    if count < 1:
        raise InputError(f"num_microbatches is {count}; an evaluation needs at least 1")
    replicas = schedule.placement.num_replicas
    routes = tuple(index % replicas for index in range(count)) if replicas > 1 else ()
    empty = replace(
        schedule,
        num_microbatches=count,
        ranks=((),) * schedule.num_ranks,
        replica_of_microbatch=routes,
    )
    picks = [_Arrivals(_lanes(empty, rank)).pick for rank in range(schedule.num_ranks)]
    return empty.with_ranks(order_by_arrival(picks, schedule.num_stages))


def _lanes(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """The forwards of each stage that a rank owns, the highest stage first."""
    lanes = (
        tuple(
            Action(stage, Kind.F, microbatch)
            for microbatch in range(schedule.num_microbatches)
            if schedule.rank_of(stage, microbatch) == rank
        )
        for stage in reversed(schedule.placement.stages_of(rank))
    )
    return [lane for lane in lanes if lane]


class _Arrivals:
    """How far one rank is in each of its lanes."""

    def __init__(self, lanes: Sequence[tuple[Action, ...]]) -> None:
        self._lanes = lanes
        self._done = [0] * len(lanes)

    def pick(self, has_arrived: HasArrived) -> Action | None:
        """The next forward of the first lane in which it has arrived."""
        for index, lane in enumerate(self._lanes):
            done = self._done[index]
            if done < len(lane) and has_arrived(lane[done]):
                self._done[index] += 1
                return lane[done]
        return None
