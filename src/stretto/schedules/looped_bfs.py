"""Breadth-first: all microbatches through one local stage before the next one."""

from __future__ import annotations

from stretto.ir import Action, Kind, Schedule, loop
from stretto.schedules.sizes import check_sizes


def looped_bfs(*, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """Run all microbatches through a local stage, then through the next; backwards in reverse.

    The bubble is v times smaller than GPipe's. A rank works on one stage for a long time, which
    leaves time to gather the parameters of the next one and to reduce the gradients of the last
    one; in return it holds the activations of all microbatches. With p = 2, v = 2, m = 3 (F and
    B drawn equally long):

        rank 0   0F0 0F1 0F2 2F0 2F1 2F2  .   .  2B0 2B1 2B2 0B0 0B1 0B2
        rank 1    .  1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2  .

    Args:
        num_ranks: Ranks, p; stage s lies on rank s mod p.
        stages_per_rank: Stages of a rank, v; with 1 this is GPipe.
        num_microbatches: Microbatches of a step, m.

    Raises:
        InputError: a size is below 1.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv 2211.05953). On every stage our
    backwards run in the order of the microbatches; those of torch's `ScheduleLoopedBFS` run in
    reverse.
    """
    check_sizes(
        "looped_bfs",
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
        num_microbatches=num_microbatches,
    )
    placement = loop(num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    return Schedule(
        placement=placement,
        num_microbatches=num_microbatches,
        ranks=tuple(
            tuple(
                Action(stage, kind, microbatch)
                for kind, stages in (
                    (Kind.F, placement.stages_of(rank)),
                    (Kind.B, reversed(placement.stages_of(rank))),
                )
                for stage in stages
                for microbatch in range(num_microbatches)
            )
            for rank in range(num_ranks)
        ),
    )
