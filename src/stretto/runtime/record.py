"""Recording what really ran: spans of actions, and what was held.

Times come from the monotonic clock, which all processes of a host share. A rank records for
itself; the engine gathers the records of all ranks into one timeline that starts at 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stretto.errors import InputError
from stretto.ir import Action, MemoryPoint, Span, StageAction, Timeline, parse_action
from stretto.runtime.wire.transport import Pending

_NS = 1e-9


class Recorder:
    """What one rank did in one step."""

    def __init__(self) -> None:
        self._spans: list[tuple[Action, int, int]] = []
        self._transfers: list[tuple[Pending, int]] = []
        self._memory: list[tuple[int, int]] = []

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Record the action from here to the end of the block."""
        start_ns = time.perf_counter_ns()
        yield
        self._spans.append((action, start_ns, time.perf_counter_ns()))

    def transfer(self, pending: Pending) -> None:
        """Record a transfer that was just issued; its end is read when the step is over."""
        self._transfers.append((pending, time.perf_counter_ns()))

    def held(self, amount: int) -> None:
        """From now on the rank holds this many stage activations."""
        self._memory.append((time.perf_counter_ns(), amount))

    def to_bytes(self) -> bytes:
        """The record, to be sent to other ranks."""
        spans = [[str(action), start, end] for action, start, end in self._spans]
        spans += [
            [str(pending.action), start, max(start, pending.done_ns)]
            for pending, start in self._transfers
            if pending.is_done
        ]
        return json.dumps([spans, self._memory]).encode()


def timeline_from_records(records: Sequence[bytes]) -> Timeline:
    """One timeline from the records of all ranks, in rank order; it starts at 0."""
    bodies = [json.loads(record) for record in records]
    starts = [start for spans, _ in bodies for _, start, _ in spans]
    if not starts:
        return Timeline(num_ranks=len(records), spans=())
    origin = min(starts)
    spans = tuple(
        Span(rank, _single(word), (start - origin) * _NS, (end - origin) * _NS)
        for rank, (spans, _) in enumerate(bodies)
        for word, start, end in spans
    )
    memory = tuple(
        MemoryPoint(rank, (time_ns - origin) * _NS, amount)
        for rank, (_, points) in enumerate(bodies)
        for time_ns, amount in points
    )
    return Timeline(num_ranks=len(records), spans=spans, memory=memory)


def _single(word: str) -> Action | StageAction:
    action = parse_action(word)
    if not isinstance(action, Action | StageAction):
        raise InputError(f"{word} is a pair; a record names single actions")
    return action
