"""What ran when: spans and a memory curve, simulated or measured.

A timeline is of the same type whether a simulator computed it or an engine recorded it, so that
one can be laid over the other. Bubble, makespan and peak memory are results of it, not fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from stretto.errors import EmptyTimelineError, InputError
from stretto.ir.action import COMPUTE, Action, StageAction, parse_action
from stretto.ir.costs import Number


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from start to end, in seconds."""

    rank: int
    action: Action | StageAction
    start_s: Number
    end_s: Number

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise InputError(
                f"rank {self.rank}, {self.action}: ends at {self.end_s} before it starts at "
                f"{self.start_s}"
            )

    @property
    def is_compute(self) -> bool:
        """Whether the span is work (F, B, I, W) and not a transfer."""
        return isinstance(self.action, Action) and self.action.kind in COMPUTE


class MemoryPoint(NamedTuple):
    """From `time_s` on a rank holds `amount` (stage activations, or bytes where costs say so)."""

    rank: int
    time_s: Number
    amount: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans of all ranks and what they held in memory.

    Args:
        num_ranks: Number of ranks.
        spans: In any order; a rank's compute spans do not overlap.
        memory: Changes of the amount held, ascending in time within a rank.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...] = ()

    def __post_init__(self) -> None:
        for rank in {span.rank for span in self.spans} | {point.rank for point in self.memory}:
            if not 0 <= rank < self.num_ranks:
                raise InputError(f"timeline: rank {rank} is not in 0..{self.num_ranks - 1}")


def compute_spans(timeline: Timeline, rank: int | None = None) -> tuple[Span, ...]:
    """The spans of work, of one rank or of all, ascending by start."""
    chosen = (span for span in timeline.spans if span.is_compute and rank in (None, span.rank))
    return tuple(sorted(chosen, key=lambda span: (span.start_s, span.end_s, span.rank)))


def makespan(timeline: Timeline) -> Number:
    """Time from the first start to the last end of work, over all ranks, in seconds.

    Raises:
        EmptyTimelineError: there is no compute span.
    """
    spans = _work(timeline)
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def max_rank_span(timeline: Timeline) -> Number:
    """The longest time from one rank's own first start to its own last end, in seconds.

    Raises:
        EmptyTimelineError: there is no compute span.
    """
    _work(timeline)
    spans_of = (compute_spans(timeline, rank) for rank in range(timeline.num_ranks))
    return max(max(span.end_s for span in spans) - spans[0].start_s for spans in spans_of if spans)


def bubble_fraction(timeline: Timeline) -> Number:
    """Share of rank time in which no compute action runs, in [0, 1).

    Transfers do not count as work. Time is taken from the first start on any rank to the last
    end on any rank, so a rank that starts late is idle until it starts.

    Args:
        timeline: Spans in seconds; at least one compute span that takes time.

    Raises:
        EmptyTimelineError: there is no compute span, or none takes time.

    Example:
        >>> grid = timeline_from_grid("0F0  .   .  0B0",
        ...                           " .  1F0 1B0  . ")
        >>> print(bubble_fraction(grid))
        1/2
    """
    available = timeline.num_ranks * makespan(timeline)
    if available == 0:
        raise EmptyTimelineError("bubble_fraction: no compute span of the timeline takes time")
    busy = sum(span.end_s - span.start_s for span in compute_spans(timeline))
    return max(0, 1 - _ratio(busy, available))  # the sum of floats may round up past the whole


def seconds_by_kind(timeline: Timeline) -> dict[str, Number]:
    """Time spent per kind over all ranks: F, B, I, W, and the messages from issue to arrival.

    Example:
        >>> seconds_by_kind(timeline_from_grid("0F0 0B0 0B0"))
        {'F': 1, 'B': 2}
    """
    totals: dict[str, Number] = {}
    for span in timeline.spans:
        name = span.action.kind.value
        totals[name] = totals.get(name, 0) + span.end_s - span.start_s
    return totals


def peak_memory(timeline: Timeline) -> tuple[Number, ...]:
    """The largest amount each rank holds at any time, in the unit of the memory curve."""
    peaks: list[Number] = [0] * timeline.num_ranks
    for point in timeline.memory:
        peaks[point.rank] = max(peaks[point.rank], point.amount)
    return tuple(peaks)


def timeline_from_grid(*rows: str) -> Timeline:
    """Read a drawing: one row per rank, one word per time slot of one second, `.` for idle.

    A word repeated in the next slot makes the action longer.

    Example:
        >>> makespan(timeline_from_grid("0F0 0B0 0B0"))
        3
    """
    spans: list[Span] = []
    for rank, row in enumerate(rows):
        for slot, word in enumerate(row.split()):
            if word == ".":
                continue
            action = parse_action(word)
            if not isinstance(action, Action | StageAction):
                raise InputError(f"grid: {word} is a pair; draw its halves")
            last = spans[-1] if spans and spans[-1].rank == rank else None
            if last is not None and last.action == action and last.end_s == slot:
                spans[-1] = Span(rank, action, last.start_s, slot + 1)
            else:
                spans.append(Span(rank, action, slot, slot + 1))
    return Timeline(num_ranks=len(rows), spans=tuple(spans))


def _ratio(part: Number, whole: Number) -> Number:
    if isinstance(part, float) or isinstance(whole, float):
        return float(part) / float(whole)
    return Fraction(part) / Fraction(whole)


def _work(timeline: Timeline) -> tuple[Span, ...]:
    spans = compute_spans(timeline)
    if not spans:
        raise EmptyTimelineError("the timeline has no compute span")
    return spans
