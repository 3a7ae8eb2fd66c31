"""Costs and timelines: exact numbers, and figures of drawings."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from stretto.errors import EmptyTimelineError, InputError
from stretto.ir import (
    Action,
    Costs,
    Kind,
    Link,
    MemoryPoint,
    Span,
    Timeline,
    bubble_fraction,
    check_stage_count,
    compute_spans,
    makespan,
    max_rank_span,
    parse_number,
    peak_memory,
    timeline_from_grid,
    uniform_costs,
)

NAN = float("nan")


def unit_costs(**more: Any) -> Costs:
    """One stage with the unit costs and whatever else is given."""
    return Costs(forward_s=(1,), input_s=(1,), weight_s=(1,), **more)


def test_whole_backwards_cost_both_halves_unless_given() -> None:
    """B = I + W; an own figure wins."""
    costs = Costs(forward_s=(1, 1), input_s=(2, 2), weight_s=(3, 3))
    assert costs.seconds(Action(1, Kind.B, 0)) == 5
    own = Costs(forward_s=(1,), input_s=(2,), weight_s=(3,), backward_s=(4,))
    assert own.seconds(Action(0, Kind.B, 0)) == 4
    assert own.seconds(Action(0, Kind.SEND_F, 0)) == 0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Costs(forward_s=(), input_s=(), weight_s=()), "forward_s is empty"),
        (lambda: Costs(forward_s=(1,), input_s=(1, 1), weight_s=(1,)), "input_s has 2 entries"),
        (lambda: Costs(forward_s=(-1,), input_s=(1,), weight_s=(1,)), "forward_s holds .*-1"),
        (lambda: Costs(forward_s=(1,), input_s=(NAN,), weight_s=(1,)), "input_s holds .*nan"),
        (lambda: uniform_costs(1, latency_s=-1), "latency_s is -1"),
        (lambda: uniform_costs(1, latency_s=NAN), "latency_s is nan"),
        (lambda: unit_costs(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s is 0"),
        (lambda: unit_costs(bandwidth_bytes_per_s=NAN), "bandwidth_bytes_per_s is nan"),
        (lambda: check_stage_count(uniform_costs(2), 3), "for 2 stages, the schedule has 3"),
        (lambda: uniform_costs(0), "num_stages is 0"),
        (lambda: parse_number("1/0"), "'1/0' is not a number"),
        (lambda: parse_number("fast"), "'fast' is not a number"),
    ],
)
def test_costs_that_make_no_sense_are_named(make: object, told: str) -> None:
    """The error has the field and the value."""
    with pytest.raises(InputError, match=told):
        make()  # type: ignore[operator]  # reason: a list of functions of several types


def test_hops_cost_latency_and_bytes_over_bandwidth() -> None:
    """Exactly, with the figures of the hop's own link where it has one."""
    costs = Costs(
        forward_s=(1, 1),
        input_s=(1, 1),
        weight_s=(1, 1),
        output_bytes=(10, 20),
        latency_s=Fraction(1, 2),
        bandwidth_bytes_per_s=3,
        links=(Link(source=1, target=0, latency_s=2), Link(source=0, target=2, latency_s=0.5)),
    )
    assert costs.hop_seconds(0, 1, stage=0) == Fraction(1, 2) + Fraction(10, 3)
    assert costs.hop_seconds(0, 1, stage=1) == Fraction(1, 2) + Fraction(20, 3)
    assert costs.hop_seconds(1, 0, stage=0) == 2
    assert costs.hop_seconds(0, 2, stage=0) == 0.5
    floats = unit_costs(output_bytes=(1,), bandwidth_bytes_per_s=8.0)
    assert str(floats.hop_seconds(0, 1, stage=0)) == "0.125"  # a float, not a fraction
    assert costs.hop_seconds(1, 1, stage=0) == 0
    assert uniform_costs(2, latency_s=7).hop_seconds(0, 1, stage=0) == 7


def test_numbers_stay_exact() -> None:
    """Whole numbers and fractions are read as such."""
    assert [parse_number(text) for text in ("3", "3/2", "0.5")] == [3, Fraction(3, 2), 0.5]
    assert isinstance(parse_number("3"), int)


def test_figures_of_a_drawing() -> None:
    """Idle time counts from the first start on any rank to the last end on any."""
    drawn = timeline_from_grid("0F0  .   .  0B0", " .  1F0 1B0  . ")
    assert makespan(drawn) == 4
    assert max_rank_span(drawn) == 4
    assert bubble_fraction(drawn) == Fraction(1, 2)
    late = timeline_from_grid(" .  .  0F0 0B0 0B0")
    assert makespan(late) == 3
    assert bubble_fraction(late) == 0


def test_words_of_a_drawing_last_until_they_change() -> None:
    """A repeated word makes its action longer; a pair cannot be drawn."""
    drawn = timeline_from_grid("0F0 0F0  .  0B0", " .   .  1F0 1F1")
    assert [(s.rank, str(s.action), s.start_s, s.end_s) for s in drawn.spans] == [
        (0, "0F0", 0, 2),
        (0, "0B0", 3, 4),
        (1, "1F0", 2, 3),
        (1, "1F1", 3, 4),
    ]
    assert [str(span.action) for span in compute_spans(drawn)] == ["0F0", "1F0", "0B0", "1F1"]
    assert len(timeline_from_grid("0F0  .  0F0").spans) == 2
    with pytest.raises(InputError, match="is a pair; draw its halves"):
        timeline_from_grid("(0F1;0B0)OVERLAP_F_B")


def test_a_rank_that_rests_at_its_ends_has_a_shorter_span() -> None:
    """The makespan counts the fill of the pipe, the longest span of one rank does not."""
    drawn = timeline_from_grid("0F0 0F1 0F2  .   . ", " .   .  1F0 1F1 1F2")
    assert (makespan(drawn), max_rank_span(drawn)) == (5, 3)
    assert bubble_fraction(drawn) == Fraction(4, 10)


def test_transfers_are_no_work() -> None:
    """A message in flight fills no bubble and moves no end."""
    drawn = timeline_from_grid("0F0 0SEND_F0 0SEND_F0 0B0 0SEND_F1")
    assert makespan(drawn) == 4
    assert bubble_fraction(drawn) == Fraction(1, 2)


def test_a_busy_rank_has_no_negative_bubble() -> None:
    """0.6 + 1.1 + 0.1 is more than 1.8 in floats; the figure stays in [0, 1)."""
    times = [0.0, 0.6, 1.7, 1.8]
    spans = tuple(
        Span(0, Action(0, Kind.F, index), start, end)
        for index, (start, end) in enumerate(pairwise(times))
    )
    assert sum(span.end_s - span.start_s for span in spans) > 1.8
    assert bubble_fraction(Timeline(num_ranks=1, spans=spans)) == 0


def test_peaks_are_the_largest_amounts_of_the_curve() -> None:
    """A rank that never holds anything has peak 0."""
    points = [MemoryPoint(1, 0, 2), MemoryPoint(1, 1, Fraction(5, 2)), MemoryPoint(1, 2, 0)]
    curve = Timeline(num_ranks=3, spans=(), memory=tuple(points))
    assert peak_memory(curve) == (0, Fraction(5, 2), 0)


def test_timelines_without_work_have_no_figures() -> None:
    """The error says so; spans must end after they start, on ranks that exist."""
    with pytest.raises(EmptyTimelineError, match="no compute span"):
        makespan(Timeline(num_ranks=1, spans=()))
    with pytest.raises(InputError, match="ends at 1 before it starts at 2"):
        Span(0, Action(0, Kind.F, 0), 2, 1)
    with pytest.raises(InputError, match="rank 3 is not in"):
        Timeline(num_ranks=1, spans=(Span(3, Action(0, Kind.F, 0), 0, 1),))
