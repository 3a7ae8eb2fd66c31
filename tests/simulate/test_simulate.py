"""Simulated times against drawings, an independent simulation, and known closed values."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from random_pipelines import random_order, random_placement
from stretto.errors import InputError, ScheduleError
from stretto.ir import (
    Action,
    Costs,
    Kind,
    Link,
    Schedule,
    Timeline,
    bubble_fraction,
    compute_spans,
    makespan,
    timeline_from_grid,
    uniform_costs,
)
from stretto.ir.placement import loop, v
from stretto.ir.text import parse_orders
from stretto.passes import lower
from stretto.schedules import build
from stretto.simulate import lower_bound, simulate


def times(timeline: Timeline) -> set[tuple[int, str, object, object]]:
    """Rank, action, start and end of the work."""
    return {
        (span.rank, str(span.action), span.start_s, span.end_s) for span in compute_spans(timeline)
    }


def test_1f1b_is_timed_as_drawn() -> None:
    """Two ranks, three microbatches, unit costs: every slot as the eye expects it."""
    drawn = timeline_from_grid(
        "0F0 0F1  .   .  0B0 0B0 0F2 0B1 0B1  .  0B2 0B2",
        " .  1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2  .   . ",
    )
    assert times(simulate(build("one_f_one_b", num_ranks=2, num_microbatches=3))) == times(drawn)


def test_pairs_run_as_halves_and_the_forward_leaves_first() -> None:
    """The next rank's forward starts while this rank is in the pair's backward half."""
    schedule = parse_orders("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    spans = {str(span.action): span for span in compute_spans(simulate(schedule))}
    assert spans["0B0"].start_s == max(spans["0F2"].end_s, spans["1B0"].end_s)
    assert spans["1F2"].start_s < spans["0B0"].end_s + 2
    assert makespan(simulate(schedule)) == makespan(
        simulate(build("one_f_one_b", num_ranks=2, num_microbatches=3))
    )


def test_hops_delay_what_crosses_ranks_and_nothing_else() -> None:
    """A V's turn inside a rank costs nothing; links may differ; bytes cost by bandwidth."""
    schedule = Schedule(
        placement=v(num_ranks=2),
        num_microbatches=1,
        ranks=parse_orders("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", placement=v(num_ranks=2)).ranks,
    )
    costs = Costs(
        forward_s=(1,) * 4,
        input_s=(1,) * 4,
        weight_s=(1,) * 4,
        output_bytes=(8, 8, 8, 8),
        latency_s=Fraction(1, 2),
        links=(Link(source=1, target=0, latency_s=1, bandwidth_bytes_per_s=16),),
    )
    spans = {str(span.action): span for span in compute_spans(simulate(schedule, costs))}
    assert spans["1F0"].start_s == 1 + Fraction(1, 2)
    assert spans["2F0"].start_s == spans["1F0"].end_s
    assert spans["3F0"].start_s == spans["2F0"].end_s + 1 + Fraction(8, 16)


@pytest.mark.parametrize("latency", [0, Fraction(1, 2)])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs"])
def test_nothing_starts_before_what_it_needs(name: str, latency: Fraction) -> None:
    """For each F: start at or after the end of the F before plus the hop; likewise B."""
    options = {"stages_per_rank": 2} if "_bfs" in name or "inter" in name else {}
    schedule = build(name, num_ranks=4, num_microbatches=8, **options)
    spans = {
        span.action: span
        for span in compute_spans(
            simulate(schedule, uniform_costs(schedule.num_stages, latency_s=latency))
        )
    }
    for action, span in spans.items():
        assert isinstance(action, Action)
        step = -1 if action.kind is Kind.F else 1
        needed = spans.get(Action(max(0, action.stage + step), action.kind, action.microbatch))
        if needed is not None and needed is not span:
            assert span.start_s >= needed.end_s + latency


def test_equal_forward_and_backward_give_the_textbook_bubble() -> None:
    """F = B = 1, p = 4, m = 8: makespan 22, bubble 3/11."""
    costs = uniform_costs(4, input_s=Fraction(1, 2), weight_s=Fraction(1, 2))
    for name in ("gpipe", "one_f_one_b"):
        timeline = simulate(build(name, num_ranks=4, num_microbatches=8), costs)
        assert makespan(timeline) == 22
        assert bubble_fraction(timeline) == Fraction(3, 11)


def events(schedule: Schedule, seconds: dict[str, int], hop: int) -> dict[Action, tuple[int, int]]:
    """An independent simulation: repeat over all ranks until nothing changes."""
    done: dict[Action, tuple[int, int]] = {}
    last = schedule.num_stages - 1
    at = [0] * schedule.num_ranks
    free = [0] * schedule.num_ranks
    while any(at[rank] < len(order) for rank, order in enumerate(schedule.ranks)):
        for rank, order in enumerate(schedule.ranks):
            while at[rank] < len(order):
                action = order[at[rank]]
                assert isinstance(action, Action)
                s, i = action.stage, action.microbatch
                wanted = []
                if action.kind is Kind.F and s > 0:
                    wanted = [Action(s - 1, Kind.F, i)]
                elif action.kind is Kind.B:
                    wanted = [Action(s, Kind.F, i)]
                    wanted += [Action(s + 1, Kind.B, i)] if s < last else []
                if any(one not in done for one in wanted):
                    break
                ready = [
                    done[one][1] + (hop if schedule.placement.rank_of(one.stage) != rank else 0)
                    for one in wanted
                ]
                start = max([free[rank], *ready])
                done[action] = (start, start + seconds[action.kind.value])
                free[rank] = done[action][1]
                at[rank] += 1
    return done


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_are_timed_as_an_independent_simulation_times_them(seed: int) -> None:
    """Random orders on random placements, lowered or not, and their lower bound."""
    draw = random.Random(f"simulate {seed}")
    schedule = random_order(draw, random_placement(draw, draw.choice([1, 2, 3])), 3)
    f, i, w, hop = draw.randint(1, 5), draw.randint(1, 5), draw.randint(1, 5), draw.randint(0, 3)
    costs = uniform_costs(schedule.num_stages, forward_s=f, input_s=i, weight_s=w, latency_s=hop)
    timeline = simulate(schedule, costs)
    expected = events(schedule, {"F": f, "B": i + w}, hop)
    assert {s.action: (s.start_s, s.end_s) for s in compute_spans(timeline)} == expected
    assert times(simulate(lower(schedule), costs)) == times(timeline)
    assert lower_bound(schedule, costs) <= makespan(timeline)


def test_stuck_schedules_and_unfit_costs_are_named() -> None:
    """Where the first rank stands and what it waits for; how many stages the costs have."""
    circle = parse_orders("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", placement=loop(num_ranks=2))
    with pytest.raises(ScheduleError, match="rank 0, position 1: 0B0 waits for ever"):
        simulate(circle)
    with pytest.raises(InputError, match="costs are for 3 stages, the schedule has 2"):
        simulate(build("gpipe", num_ranks=2, num_microbatches=1), uniform_costs(3))
