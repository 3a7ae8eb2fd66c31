"""Where a rank is: written by the rank as it goes, read when somebody asks why all wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a rank is, as it tells others.

    Args:
        text: What it does, for how long, and what it waits for.
        holds_up: Whether it waits for nobody, so that others may be waiting for it.
    """

    text: str
    holds_up: bool


class _Mark(NamedTuple):
    doing: Any
    waits_for: Any
    since_ns: int


class Progress:
    """The place of one rank in its step; a mark costs less than a microsecond."""

    def __init__(self) -> None:
        self._mark = _Mark("in no step yet", None, time.perf_counter_ns())

    def at(self, doing: object) -> None:
        """The rank works on something from now on; printed only if somebody asks."""
        self._mark = _Mark(doing, None, time.perf_counter_ns())

    def waits_for(self, what: object) -> None:
        """What it works on waits for something, from now on."""
        self._mark = _Mark(self._mark.doing, what, time.perf_counter_ns())

    def waits_no_more(self) -> None:
        """What was waited for is there."""
        self._mark = _Mark(self._mark.doing, None, time.perf_counter_ns())

    def place(self) -> Place:
        """Where the rank is now."""
        mark = self._mark
        seconds = (time.perf_counter_ns() - mark.since_ns) * 1e-9
        if mark.waits_for is None:
            return Place(f"at {mark.doing} for {seconds:.1f} s, waits for nobody", True)
        return Place(f"at {mark.doing}, waits {seconds:.1f} s for {mark.waits_for}", False)


def hang_report(places: Mapping[int, Place]) -> str:
    """Who holds up the others, and where each rank is; lines of text."""
    guilty = [rank for rank, place in places.items() if place.holds_up]
    lines = [f"rank {rank} | {place.text}" for rank, place in places.items()]
    if guilty:
        names = ", ".join(f"rank {rank}" for rank in guilty)
        lines.insert(0, f"held up by {names}, as it seems; where the ranks are:")
    else:
        lines.insert(0, "every rank waits for another:")
    return "\n".join(lines)
