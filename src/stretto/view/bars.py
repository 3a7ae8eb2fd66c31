"""Timelines as bars on a time axis, and a plan over a measurement."""

from __future__ import annotations

from stretto.ir.action import Action
from stretto.ir.costs import Number
from stretto.ir.timeline import Span, Timeline, bubble_fraction, compute_spans, makespan
from stretto.view.paint import paint, write_seconds

FEWEST_COLUMNS = 20


def draw_bars(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """One row per rank, scaled to a width; letters say the kind, idle time is blank.

    Args:
        timeline: At least one compute span.
        width: Columns in all, at least 20.
        colour: Whether to colour the kinds with terminal codes.
    """
    total = makespan(timeline)
    names = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    margin = max(len(name) for name in names)
    columns = max(FEWEST_COLUMNS, width - margin - 3)
    rows = [
        f"{name.ljust(margin)} |{_row(timeline, rank, total, columns, colour)}|"
        for rank, name in enumerate(names)
    ]
    return "\n".join([*rows, _axis(margin, columns, total)])


def draw_overlay(
    planned: Timeline, measured: Timeline, *, width: int = 100, colour: bool = False
) -> str:
    """A plan over what ran, on one time axis: per rank two rows, plan first.

    Args:
        planned: Simulated.
        measured: Recorded, with as many ranks.
        width: Columns in all, at least 20.
        colour: Whether to colour the kinds with terminal codes.
    """
    total = max(makespan(planned), makespan(measured))
    margin = len(f"rank {measured.num_ranks - 1} plan")
    columns = max(FEWEST_COLUMNS, width - margin - 3)
    rows: list[str] = []
    for rank in range(measured.num_ranks):
        for name, timeline in ((f"rank {rank} plan", planned), ("ran", measured)):
            bar = _row(timeline, rank, total, columns, colour)
            rows.append(f"{name.rjust(margin)} |{bar}|")
    rows.append(_axis(margin, columns, total))
    for name, timeline in (("planned", planned), ("measured", measured)):
        bubble = float(bubble_fraction(timeline)) * 100
        rows.append(f"{name}: makespan {write_seconds(makespan(timeline))}, bubble {bubble:.1f} %")
    return "\n".join(rows)


def _row(timeline: Timeline, rank: int, total: Number, columns: int, colour: bool) -> str:
    origin = min(span.start_s for span in compute_spans(timeline))
    scale = columns / float(total) if total else 0.0
    cells: list[str] = []
    at = 0
    for span in compute_spans(timeline, rank):
        first = max(at, min(columns, round(float(span.start_s - origin) * scale)))
        last = max(first, min(columns, round(float(span.end_s - origin) * scale)))
        cells += [" " * (first - at), paint(_bar(span, last - first), span.action, colour)]
        at = last
    return "".join(cells) + " " * (columns - at)


def _bar(span: Span, length: int) -> str:
    """The action's kind and microbatch where they fit, the kind's letter drawn out."""
    if not isinstance(span.action, Action):
        return "-" * length
    letter = span.action.kind.value
    for text in (str(span.action), f"{letter}{span.action.microbatch}"):
        if len(text) < length:
            return text.ljust(length, letter.lower())
    return letter[:length] + letter.lower() * (length - 1)


def _axis(margin: int, columns: int, total: Number) -> str:
    end = write_seconds(total)
    return " " * (margin + 2) + "0" + end.rjust(columns - 1)
