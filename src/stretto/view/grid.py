"""Timelines as grids of words: one row per rank, one column per unit of time."""

from __future__ import annotations

from fractions import Fraction
from math import gcd

from stretto.ir.costs import Number
from stretto.ir.schedule import Schedule
from stretto.ir.timeline import Span, Timeline, compute_spans, makespan
from stretto.view.bars import draw_bars
from stretto.view.paint import paint

MOST_SLOTS = 400
"""A grid has at the most this many columns; longer timelines are drawn as bars."""


def draw_schedule(schedule: Schedule) -> str:
    """The orders, one row per rank, without time.

    Example:
        >>> from stretto.ir.text import parse_orders
        >>> print(draw_schedule(parse_orders("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1")))
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1B0 1F1 1B1
    """
    wide = max((len(str(item)) for order in schedule.ranks for item in order), default=0)
    rows = [" ".join(str(item).ljust(wide) for item in order) for order in schedule.ranks]
    return "\n".join(f"{_label(rank, len(rows))}{row}".rstrip() for rank, row in enumerate(rows))


def draw_timeline(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """A grid where all times are multiples of one unit and the grid is not too long, else bars.

    Args:
        timeline: Simulated or measured.
        width: Columns for bars; a grid takes what it takes.
        colour: Whether to colour the kinds with terminal codes.
    """
    unit = _unit(timeline)
    if unit is None or makespan(timeline) / unit > MOST_SLOTS:
        return draw_bars(timeline, width=width, colour=colour)
    return draw_grid(timeline, unit=unit, colour=colour)


def draw_grid(timeline: Timeline, *, unit: Number = 1, colour: bool = False) -> str:
    """One column per unit of time; an action that lasts longer fills its further columns with =.

    Example:
        >>> from stretto.ir.timeline import timeline_from_grid
        >>> print(draw_grid(timeline_from_grid("0F0 . . . 0B0 0B0", ". 1F0 1B0 1B0")))
        rank 0 | 0F0  .   .   .  0B0 ===
        rank 1 |  .  1F0 1B0 ===  .   .
    """
    spans = compute_spans(timeline)
    origin = min(span.start_s for span in spans)
    slots = round((max(span.end_s for span in spans) - origin) / unit)
    wide = max(len(str(span.action)) for span in spans)
    rows: list[str] = []
    for rank in range(timeline.num_ranks):
        cells = [".".center(wide)] * slots
        for span in compute_spans(timeline, rank):
            first, last = (round((time - origin) / unit) for time in (span.start_s, span.end_s))
            for slot in range(first, last):
                text = str(span.action).ljust(wide) if slot == first else "=" * wide
                cells[slot] = paint(text, span.action, colour)
        rows.append(_label(rank, timeline.num_ranks) + " ".join(cells).rstrip())
    return "\n".join(rows)


def _label(rank: int, num_ranks: int) -> str:
    return f"rank {rank:>{len(str(num_ranks - 1))}} | "


def _unit(timeline: Timeline) -> Number | None:
    """The longest time that all starts and ends are multiples of, if times are exact."""
    spans = compute_spans(timeline)
    times = [time for span in spans for time in _ends(span)]
    if any(isinstance(time, float) for time in times) or makespan(timeline) == 0:
        return None
    shared = Fraction(0)
    origin = min(Fraction(time) for time in times)
    for time in times:
        shared = _gcd(shared, Fraction(time) - origin)
    return int(shared) if shared.denominator == 1 else shared


def _ends(span: Span) -> tuple[Number, Number]:
    return span.start_s, span.end_s


def _gcd(left: Fraction, right: Fraction) -> Fraction:
    return Fraction(
        gcd(left.numerator * right.denominator, right.numerator * left.denominator),
        left.denominator * right.denominator,
    )
