"""Timelines as trace JSON, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from stretto.ir.action import Action
from stretto.ir.timeline import Timeline

_MICROSECONDS = 1e6


def to_trace(timeline: Timeline) -> str:
    """One process with a row per rank for work and one for messages.

    Args:
        timeline: Simulated or measured; times in seconds.

    Returns:
        JSON in the trace event format: complete events (`ph: X`) in microseconds, named by their
        action, and a counter of what each rank holds.
    """
    events: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        for row, what in ((2 * rank, "work"), (2 * rank + 1, "messages")):
            name = {"name": f"rank {rank} {what}"}
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": name})
    for span in timeline.spans:
        action = span.action
        microbatch = action.microbatch if isinstance(action, Action) else None
        events.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": action.kind.value,
                "pid": 0,
                "tid": 2 * span.rank + (0 if span.is_compute else 1),
                "ts": float(span.start_s) * _MICROSECONDS,
                "dur": float(span.end_s - span.start_s) * _MICROSECONDS,
                "args": {"stage": action.stage, "microbatch": microbatch},
            }
        )
    for point in timeline.memory:
        events.append(
            {
                "ph": "C",
                "name": f"held by rank {point.rank}",
                "pid": 0,
                "ts": float(point.time_s) * _MICROSECONDS,
                "args": {"held": float(point.amount)},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
