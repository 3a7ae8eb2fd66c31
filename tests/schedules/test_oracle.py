"""The orders of torch's own generators, as an oracle."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from stretto.schedules import build


def words(order: Any) -> list[str]:
    """Printed actions of single microbatches, holes left out."""
    texts = [str(item) for item in order if item is not None]
    return [text for text in texts if not text.endswith("REDUCE_GRAD")]


class Sizes:
    """As much of a torch schedule object as its order functions read."""

    def __init__(self, p: int, v: int, m: int) -> None:
        self.pp_group_size = p
        self.n_local_stages = v
        self._n_microbatches = m
        self._stages = [None] * v
        self.number_of_rounds = max(1, m // p)
        self.microbatches_per_round = m // self.number_of_rounds


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_interleaved_orders_equal_torchs(p: int, v: int, times: int) -> None:
    """Rank by rank, action by action, where p divides m."""
    m = times * p
    ours = build("interleaved_1f1b", num_ranks=p, stages_per_rank=v, num_microbatches=m)
    for rank in range(p):
        theirs = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(
            Sizes(p, v, m), rank
        )
        assert words(ours.ranks[rank]) == words(theirs), rank


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_breadth_first_forwards_equal_torchs_and_backwards_ascend(p: int, v: int) -> None:
    """Torch runs the backwards of a stage descending; ours ascend, stage by stage."""
    m = 2 * p
    ours = build("looped_bfs", num_ranks=p, stages_per_rank=v, num_microbatches=m)
    for rank in range(p):
        theirs = words(
            torch_schedules.ScheduleLoopedBFS._calculate_single_rank_operations(
                Sizes(p, v, m), rank
            )
        )
        mine = words(ours.ranks[rank])
        count = v * m
        assert mine[:count] == theirs[:count]
        backwards = theirs[count:]
        stages = [backwards[at : at + m][::-1] for at in range(0, count, m)]
        assert mine[count:] == [word for stage in stages for word in stage]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_1f1b_orders_equal_torchs_but_for_its_last_row(p: int) -> None:
    """Torch lists microbatches 1..m on the last rank; ours are 0..m-1 there, in the same order."""
    m = 2 * p
    ours = build("one_f_one_b", num_ranks=p, num_microbatches=m)

    class One:
        pp_group_size = p
        _num_stages = p
        _n_microbatches = m
        rank = 0

    theirs = torch_schedules.Schedule1F1B._get_pipeline_order(One())
    assert theirs is not None
    for rank in range(p - 1):
        assert words(ours.ranks[rank]) == words(theirs[rank]), rank
    last = words(ours.ranks[p - 1])
    assert last == [f"{p - 1}{kind}{i}" for i in range(m) for kind in "FB"]


def test_schedules_travel_both_ways_as_csv(tmp_path: Any) -> None:
    """Torch's reader takes our CSV, and we read what torch writes."""
    from stretto.ir.text import from_csv, to_csv

    ours = build("interleaved_1f1b", num_ranks=4, stages_per_rank=2, num_microbatches=8)
    theirs = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(to_csv(ours).splitlines())
    }
    assert [words(theirs[rank]) for rank in range(4)] == [words(order) for order in ours.ranks]
    text = "\n".join(",".join(map(str, order)) for order in theirs.values())
    assert from_csv(text) == ours
