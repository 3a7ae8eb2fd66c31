"""Costs and timelines: exact numbers, and figures of drawings."""

from __future__ import annotations

from fractions import Fraction

import pytest

from stretto.errors import EmptyTimelineError, InputError
from stretto.ir import (
    Action,
    Costs,
    Kind,
    Span,
    Timeline,
    bubble_fraction,
    makespan,
    max_rank_span,
    parse_number,
    timeline_from_grid,
    uniform_costs,
)


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
        (lambda: Costs(forward_s=(-1,), input_s=(1,), weight_s=(1,)), "negative"),
        (lambda: uniform_costs(1, latency_s=-1), "latency_s is -1"),
        (lambda: uniform_costs(0), "num_stages is 0"),
        (lambda: parse_number("1/0"), "'1/0' is not a number"),
        (lambda: parse_number("fast"), "'fast' is not a number"),
    ],
)
def test_costs_that_make_no_sense_are_named(make: object, told: str) -> None:
    """The error has the field and the value."""
    with pytest.raises(InputError, match=told):
        make()  # type: ignore[operator]  # reason: a list of functions of several types


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


def test_timelines_without_work_have_no_figures() -> None:
    """The error says so; spans must end after they start, on ranks that exist."""
    with pytest.raises(EmptyTimelineError, match="no compute span"):
        makespan(Timeline(num_ranks=1, spans=()))
    with pytest.raises(InputError, match="ends at 1 before it starts at 2"):
        Span(0, Action(0, Kind.F, 0), 2, 1)
    with pytest.raises(InputError, match="rank 3 is not in"):
        Timeline(num_ranks=1, spans=(Span(3, Action(0, Kind.F, 0), 0, 1),))
