"""Drawings that the eye can check."""

from __future__ import annotations

import json
import re

from stretto.ir import uniform_costs
from stretto.ir.text import parse_orders
from stretto.schedules import build
from stretto.simulate import simulate
from stretto.view import draw_bars, draw_overlay, draw_schedule, draw_timeline, summarise, to_trace


def test_unit_costs_are_drawn_as_a_grid() -> None:
    """One column per unit of time, dots where a rank is idle."""
    timeline = simulate(build("one_f_one_b", num_ranks=2, num_microbatches=2))
    assert draw_timeline(timeline).splitlines() == [
        "rank 0 | 0F0 0F1  .   .  0B0 ===  .  0B1 ===",
        "rank 1 |  .  1F0 1B0 === 1F1 1B1 ===  .   .",
    ]


def test_fractions_share_the_longest_unit() -> None:
    """Costs of 1/2 and 3/2 are drawn in halves."""
    costs = uniform_costs(1, forward_s=parse("1/2"), input_s=1, weight_s=parse("1/2"))
    drawn = draw_timeline(simulate(parse_orders("0F0 0B0"), costs))
    assert drawn == "rank 0 | 0F0 0B0 === ==="


def parse(text: str) -> object:
    """A number of the costs' kind."""
    from stretto.ir import parse_number

    return parse_number(text)


def test_orders_are_drawn_without_time() -> None:
    """One row per rank, aligned."""
    assert draw_schedule(parse_orders("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")).splitlines() == [
        "rank 0 | 0F0 0F1 0B0 0B1",
        "rank 1 | 1F0 1B0 1F1 1B1",
    ]


def test_measured_times_are_drawn_as_bars_of_a_width() -> None:
    """Every row is as wide as asked for, and work is where it ran."""
    costs = uniform_costs(4, forward_s=0.01, input_s=0.011, weight_s=0.012, latency_s=0.001)
    timeline = simulate(build("one_f_one_b", num_ranks=4, num_microbatches=4), costs)
    lines = draw_timeline(timeline, width=80).splitlines()
    assert {len(line) for line in lines[:4]} == {80}
    assert lines[0].startswith("rank 0 |F0f")
    assert lines[3].startswith("rank 3 |   ")
    assert lines[-1].endswith(" ms")


def test_a_plan_lies_over_its_measurement_on_one_axis() -> None:
    """Two rows per rank, plan first; the longer of both fills the axis."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=2)
    plan = simulate(schedule, uniform_costs(2, forward_s=1.0))
    ran = simulate(schedule, uniform_costs(2, forward_s=2.0))
    lines = draw_overlay(plan, ran, width=60).splitlines()
    assert [line.split("|")[0].split() for line in lines[:4]] == [
        ["rank", "0", "plan"],
        ["ran"],
        ["rank", "1", "plan"],
        ["ran"],
    ]
    assert lines[0].rstrip("|").endswith("  ")
    assert not lines[1].rstrip("|").endswith(" ")
    assert "planned: makespan 9 s" in lines[-2]
    assert "measured: makespan 12 s" in lines[-1]


def test_colour_changes_nothing_but_codes() -> None:
    """Without the codes a coloured drawing is the plain one."""
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2))
    for draw in (draw_timeline, draw_bars):
        plain, coloured = draw(timeline), draw(timeline, colour=True)
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_the_summary_tells_the_figures() -> None:
    """Makespan, rank span, bubble and peaks."""
    assert summarise(simulate(build("one_f_one_b", num_ranks=4, num_microbatches=8))) == (
        "makespan 33, longest rank span 33, bubble 27.3 %, peak per rank 4 3 2 1"
    )


def test_traces_have_a_row_per_rank_for_work_and_messages() -> None:
    """Complete events in microseconds, named by action; messages apart; memory as a counter."""
    costs = uniform_costs(2, latency_s=1)
    body = json.loads(to_trace(simulate(build("gpipe", num_ranks=2, num_microbatches=1), costs)))
    work = [one for one in body["traceEvents"] if one["ph"] == "X" and one["tid"] % 2 == 0]
    assert [(one["name"], one["tid"], one["ts"], one["dur"]) for one in work] == [
        ("0F0", 0, 0, 1e6),
        ("1F0", 2, 2e6, 1e6),
        ("1B0", 2, 3e6, 2e6),
        ("0B0", 0, 6e6, 2e6),
    ]
    sent = [one for one in body["traceEvents"] if one["ph"] == "X" and one["tid"] % 2 == 1]
    assert [one["name"] for one in sent] == ["0SEND_F0", "1SEND_B0"]
    assert any(one["ph"] == "C" and one["args"] == {"held": 1.0} for one in body["traceEvents"])
