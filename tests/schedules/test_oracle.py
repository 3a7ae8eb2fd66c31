"""The orders of torch's own generators, as an oracle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from stretto.ir.text import from_csv, to_csv
from stretto.passes import add_comms
from stretto.schedules import build
from stretto.verify import verify


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

    theirs = torch_schedules.Schedule1F1B._get_pipeline_order(
        SimpleNamespace(_num_stages=p, _n_microbatches=m)
    )
    assert theirs is not None
    for rank in range(p - 1):
        assert words(ours.ranks[rank]) == words(theirs[rank]), rank
    last = words(ours.ranks[p - 1])
    assert last == [f"{p - 1}{kind}{i}" for i in range(m) for kind in "FB"]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (8, 3)])
def test_gpipe_orders_equal_torchs(p: int, m: int) -> None:
    """All forwards, then all backwards, both ascending."""
    theirs = torch_schedules.ScheduleGPipe._get_pipeline_order(
        SimpleNamespace(_num_stages=p, _n_microbatches=m)
    )
    assert theirs is not None
    ours = build("gpipe", num_ranks=p, num_microbatches=m)
    assert [words(order) for order in ours.ranks] == [words(theirs[rank]) for rank in range(p)]


def stages_of_rank_0(p: int, v: int) -> list[Any]:
    """As much of torch's stages as its schedules read before they run."""
    shared = {"num_stages": p * v, "group_size": p, "group_rank": 0, "submod": None}
    return [
        SimpleNamespace(stage_index=c * p, is_first=c == 0, is_last=False, **shared)
        for c in range(v)
    ]


SIZES = {"num_ranks": 4, "stages_per_rank": 2, "num_microbatches": 8}


def test_torchs_runtime_loads_our_csv(tmp_path: Path) -> None:
    """Orders alone, and with our transfers: torch's own simulator then runs them to the end."""
    file = tmp_path / "schedule.csv"
    for name in ("interleaved_1f1b", "looped_bfs"):
        ours = build(name, **SIZES)
        runtime = torch_schedules._PipelineScheduleRuntime(stages_of_rank_0(4, 2), 8)
        file.write_text(to_csv(ours))
        runtime._load_csv(str(file))
        orders = [runtime.pipeline_order[rank] for rank in range(4)]
        assert [words(order) for order in orders] == [words(order) for order in ours.ranks]

        # its simulator takes a receive only once it has been sent, so none is posted ahead here
        lowered = add_comms(ours, ahead=0)
        file.write_text(to_csv(lowered))
        runtime._load_csv(str(file), format="compute_comms")
        ran = runtime._simulate()
        assert [words(ran[rank]) for rank in range(4)] == [words(each) for each in lowered.ranks]


def test_we_load_what_torch_writes(tmp_path: Path) -> None:
    """Its orders with holes equal ours; its lowered program passes our proof."""
    theirs = torch_schedules.ScheduleInterleaved1F1B(stages_of_rank_0(4, 2), 8)
    file = tmp_path / "schedule.csv"
    theirs._dump_csv(str(file), format="compute_only")
    assert ",," in file.read_text()
    assert from_csv(file.read_text()) == build("interleaved_1f1b", **SIZES)

    theirs._dump_csv(str(file), format="compute_comms")
    program = from_csv(file.read_text())
    assert program.is_lowered
    assert any(str(item) == "0UNSHARD" for item in program.ranks[0])
    assert verify(program) == ()


def test_torchs_faulty_last_row_is_read_as_it_is_and_told() -> None:
    """Its 1F1B counts microbatches from 1 on the last rank: verify names what is missing."""
    p, m = 4, 8
    theirs = torch_schedules.Schedule1F1B._get_pipeline_order(
        SimpleNamespace(_num_stages=p, _n_microbatches=m)
    )
    assert theirs is not None
    text = "\n".join(",".join(words(theirs[rank])) for rank in range(p))
    told = [str(one) for one in verify(from_csv(text))]
    assert any("3F0 is missing" in one for one in told)
