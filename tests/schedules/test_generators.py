"""Every generator over many sizes, and the closed forms of those that have them."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from stretto.errors import InputError
from stretto.ir import (
    Action,
    Kind,
    Schedule,
    bubble_fraction,
    compute_only,
    makespan,
    uniform_costs,
)
from stretto.ir import (
    peak_memory as peak_of,
)
from stretto.ir.files import schedule_from_json, schedule_to_json
from stretto.ir.text import format_orders, from_csv, parse_orders, to_csv
from stretto.passes import forward_part, lower
from stretto.schedules import GENERATORS, build
from stretto.simulate import lower_bound, simulate
from stretto.verify import peak_memory, verify

LOOPED = ("interleaved_1f1b", "looped_bfs")
RATIOS = ((1, 1, 1), (2, 3, 1), (4, 4, 3), (1, 2, 5))
"""F, I and W of one stage."""


def sizes(name: str) -> list[dict[str, int]]:
    """Ranks, microbatches and stages per rank to try."""
    stages = (2, 3) if name in LOOPED else (0,)
    every = product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 11), stages)
    return [
        {"num_ranks": p, "num_microbatches": m} | ({"stages_per_rank": v} if v else {})
        for p, m, v in every
    ]


@pytest.mark.parametrize("name", GENERATORS)
def test_every_size_is_complete_and_backwards_ascend(name: str) -> None:
    """Each F and B once, and the backwards of every stage in order of microbatch."""
    for size in sizes(name):
        schedule = build(name, **size)
        m = size["num_microbatches"]
        for stage in range(schedule.num_stages):
            order = schedule.ranks[schedule.placement.rank_of(stage)]
            for kind in (Kind.F, Kind.B):
                ran = [
                    item.microbatch
                    for item in order
                    if isinstance(item, Action) and item.stage == stage and item.kind is kind
                ]
                assert ran == list(range(m)), (size, stage, kind)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_size_survives_files_and_lowering(name: str) -> None:
    """Text, CSV and JSON give the same value back; lowering leaves the compute order alone."""
    for size in sizes(name):
        schedule = build(name, **size)
        assert parse_orders(format_orders(schedule), placement=schedule.placement) == schedule
        assert from_csv(to_csv(schedule)) == schedule
        assert schedule_from_json(schedule_to_json(schedule)) == schedule
        assert compute_only(lower(schedule)) == schedule
        assert hash(build(name, **size)) == hash(schedule)


@pytest.mark.parametrize("name", GENERATORS)
def test_simulated_and_verified_memory_agree_and_no_bound_is_beaten(name: str) -> None:
    """The curve's peak is the proved peak, and no makespan lies under its bound."""
    for size in sizes(name):
        schedule = build(name, **size)
        for f, i, w in RATIOS:
            costs = uniform_costs(
                schedule.num_stages, forward_s=f, input_s=i, weight_s=w, latency_s=Fraction(f, 3)
            )
            timeline = simulate(schedule, costs)
            assert peak_of(timeline) == peak_memory(schedule)
            assert makespan(timeline) >= lower_bound(schedule, costs)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("f", "i", "w"), RATIOS)
def test_one_stage_per_rank_has_its_closed_forms(name: str, f: int, i: int, w: int) -> None:
    """Makespan (m + p - 1)(F + B); memory m, or p - r capped by m."""
    for p, m in product(range(2, 9), (1, 2, 4, 8, 16)):
        schedule = build(name, num_ranks=p, num_microbatches=m)
        timeline = simulate(schedule, uniform_costs(p, forward_s=f, input_s=i, weight_s=w))
        assert makespan(timeline) == (m + p - 1) * (f + i + w)
        assert bubble_fraction(timeline) == Fraction(p - 1, m + p - 1)
        held = m if name == "gpipe" else None
        assert peak_of(timeline) == tuple(min(m, held or p - rank) for rank in range(p))


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("f", "i", "w"), RATIOS)
def test_several_stages_per_rank_have_their_closed_forms(
    name: str, v: int, f: int, i: int, w: int
) -> None:
    """Bubble (p - 1)(F + B) / v of a rank's time; memory by rank."""
    for p, times in product(range(2, 9), (1, 2, 3)):
        m = p * times
        schedule = build(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
        timeline = simulate(schedule, uniform_costs(p * v, forward_s=f, input_s=i, weight_s=w))
        assert makespan(timeline) == (m * v + p - 1) * (f + i + w)
        warmups = [min(2 * (p - rank - 1) + (v - 1) * p, m * v) for rank in range(p)]
        interleaved = tuple(min(warmup + 1, m * v) for warmup in warmups)
        assert peak_of(timeline) == (interleaved if name in LOOPED[:1] else (m * v,) * p)


def test_known_figures_at_four_ranks_and_eight_microbatches() -> None:
    """Makespans 33, 33, 57, 57 at unit cost; interleaved holds 11, 9, 7, 5."""
    small = {"num_ranks": 4, "num_microbatches": 8}
    assert makespan(simulate(build("gpipe", **small))) == 33
    assert makespan(simulate(build("one_f_one_b", **small))) == 33
    for name in LOOPED:
        assert makespan(simulate(build(name, stages_per_rank=2, **small))) == 57
    assert peak_memory(build("interleaved_1f1b", stages_per_rank=2, **small)) == (11, 9, 7, 5)


def test_interleaving_any_number_of_microbatches_beats_the_short_last_group() -> None:
    """Where p does not divide m the order is better than the formula with a short last group."""
    for m, formula in ((9, 74), (10, 79)):
        schedule = build("interleaved_1f1b", num_ranks=4, stages_per_rank=2, num_microbatches=m)
        assert makespan(simulate(schedule)) < formula
        warmups = [min(2 * (4 - rank - 1) + 4, 2 * m) for rank in range(4)]
        assert all(
            peak <= warmup + 1 for peak, warmup in zip(peak_memory(schedule), warmups, strict=True)
        )


@pytest.mark.parametrize("name", GENERATORS)
def test_forward_parts_run_any_number_of_microbatches(name: str) -> None:
    """Every stage runs every microbatch once, no more and no less, and verifies."""
    for size, count in product(sizes(name)[::5], (1, 2, 3, 7)):
        forwards = forward_part(build(name, **size), count)
        assert verify(forwards) == ()
        ran = [item for order in forwards.ranks for item in order]
        assert len(ran) == len(set(ran)) == forwards.num_stages * count


BAD: list[tuple[str, dict[str, int], str]] = [
    ("gpip", {"num_ranks": 2, "num_microbatches": 2}, "did you mean 'gpipe'"),
    ("gpipe", {"num_ranks": 2, "num_microbatches": 0}, "num_microbatches is 0"),
    ("gpipe", {"num_ranks": 0, "num_microbatches": 1}, "num_ranks is 0"),
    ("gpipe", {"num_ranks": 2, "num_microbatches": 2, "stages_per_rank": 2}, "takes no stages_per"),
    ("interleaved_1f1b", {"num_ranks": 2, "num_microbatches": 2}, "needs stages_per_rank"),
    (
        "interleaved_1f1b",
        {"num_ranks": 2, "num_microbatches": 2, "stages_per_rank": 1},
        "stages_per_rank is 1.*one_f_one_b",
    ),
]


@pytest.mark.parametrize(("name", "size", "told"), BAD)
def test_bad_sizes_are_told_in_one_line(name: str, size: dict[str, int], told: str) -> None:
    """The message names the value, the rule and what would do."""
    with pytest.raises(InputError, match=told) as caught:
        build(name, **size)
    assert "\n" not in str(caught.value)


def test_grids_of_small_schedules() -> None:
    """The orders of four families at two ranks, drawn."""
    assert rows(build("gpipe", num_ranks=2, num_microbatches=2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
    ]
    assert rows(build("one_f_one_b", num_ranks=2, num_microbatches=3)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert rows(build("looped_bfs", num_ranks=2, num_microbatches=2, stages_per_rank=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]
    assert rows(build("interleaved_1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def rows(schedule: Schedule) -> list[str]:
    """One line of printed actions per rank."""
    return format_orders(schedule).splitlines()
