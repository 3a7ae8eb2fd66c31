"""Drawings of schedules and timelines, as text."""

from stretto.view.bars import draw_bars, draw_overlay
from stretto.view.grid import draw_grid, draw_schedule, draw_timeline
from stretto.view.paint import write_number, write_seconds
from stretto.view.summary import summarise
from stretto.view.trace import to_trace

__all__ = [
    "draw_bars",
    "draw_grid",
    "draw_overlay",
    "draw_schedule",
    "draw_timeline",
    "summarise",
    "to_trace",
    "write_number",
    "write_seconds",
]
