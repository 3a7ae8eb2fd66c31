"""1F1B: a backward as soon as there is one, one stage per rank."""

from __future__ import annotations

from stretto.ir import Action, Kind, Schedule, loop
from stretto.schedules.phases import warmup_steady_cooldown
from stretto.schedules.sizes import check_sizes


def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Run one forward and one backward in turn, after a warmup that shrinks along the ranks.

    As fast as GPipe, but rank r never holds the activations of more than p - r microbatches,
    however many there are. With p = 3, m = 4 (F and B drawn equally long):

        rank 0   0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        rank 1    .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
        rank 2    .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .

    Args:
        num_ranks: Ranks, p; stage r lies on rank r.
        num_microbatches: Microbatches of a step, m; any number, below p too.

    Raises:
        InputError: a size is below 1.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (arXiv 2006.09503),
    "PipeDream-Flush"; Narayanan et al., Megatron-LM (arXiv 2104.04473).
    """
    check_sizes("one_f_one_b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return Schedule(
        placement=loop(num_ranks=num_ranks),
        num_microbatches=num_microbatches,
        ranks=tuple(
            warmup_steady_cooldown(
                [Action(rank, Kind.F, microbatch) for microbatch in range(num_microbatches)],
                [Action(rank, Kind.B, microbatch) for microbatch in range(num_microbatches)],
                num_warmup=min(num_ranks - rank - 1, num_microbatches),
            )
            for rank in range(num_ranks)
        ),
    )
