"""GPipe: all forwards, then all backwards, one stage per rank."""

from __future__ import annotations

from stretto.ir import Action, Kind, Schedule, loop
from stretto.schedules.sizes import check_sizes


def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Fill the pipeline with every forward, then drain it with every backward.

    The simplest schedule. It idles no longer than 1F1B, but every rank holds the activations of
    all microbatches at once. With p = 3, m = 3 (F and B drawn equally long):

        rank 0   0F0 0F1 0F2  .   .   .   .  0B0 0B1 0B2
        rank 1    .  1F0 1F1 1F2  .   .  1B0 1B1 1B2  .
        rank 2    .   .  2F0 2F1 2F2 2B0 2B1 2B2  .   .

    Args:
        num_ranks: Ranks, p; stage r lies on rank r.
        num_microbatches: Microbatches of a step, m.

    Raises:
        InputError: a size is below 1.

    Source: Huang et al., GPipe (arXiv 1811.06965). Our backwards run in the order of the
    microbatches.
    """
    check_sizes("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return Schedule(
        placement=loop(num_ranks=num_ranks),
        num_microbatches=num_microbatches,
        ranks=tuple(
            tuple(
                Action(rank, kind, microbatch)
                for kind in (Kind.F, Kind.B)
                for microbatch in range(num_microbatches)
            )
            for rank in range(num_ranks)
        ),
    )
