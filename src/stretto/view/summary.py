"""The figures of a timeline in one line."""

from __future__ import annotations

from stretto.ir.timeline import Timeline, bubble_fraction, makespan, max_rank_span, peak_memory
from stretto.view.paint import write_number


def summarise(timeline: Timeline) -> str:
    """Makespan, bubble and peak per rank; the span of a rank where it differs.

    Example:
        >>> from stretto.ir.timeline import timeline_from_grid
        >>> print(summarise(timeline_from_grid("0F0 .   .   0B0", ". 1F0 1B0 .")))
        makespan 4, longest rank span 4, bubble 50.0 %
    """
    parts = [
        f"makespan {write_number(makespan(timeline))}",
        f"longest rank span {write_number(max_rank_span(timeline))}",
        f"bubble {float(bubble_fraction(timeline)) * 100:.1f} %",
    ]
    peaks = peak_memory(timeline)
    if any(peaks):
        parts.append("peak per rank " + " ".join(write_number(peak) for peak in peaks))
    return ", ".join(parts)
