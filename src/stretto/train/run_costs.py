"""What a run's own timelines say about the cost of its stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from stretto.errors import EmptyTimelineError
from stretto.ir import Action, Costs, Kind, Timeline

Medians = Mapping[tuple[int, Kind], float]


def median_costs(timelines: Sequence[Timeline], num_stages: int) -> Costs:
    """The median seconds of each stage's F, I and W (or B) over recorded steps.

    A stage whose backward was not split has half of B for I and half for W. Messages are taken
    to be free: what they cost shows as the difference between plan and measurement.

    Args:
        timelines: Recorded steps of one schedule.
        num_stages: Stages of that schedule.

    Raises:
        EmptyTimelineError: a stage has no forward or no backward in them.
    """
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if span.is_compute and isinstance(span.action, Action):
                key = span.action.stage, span.action.kind
                seconds[key].append(float(span.end_s - span.start_s))
    medians = {key: median(values) for key, values in seconds.items()}
    parts = [_backward(medians, stage) for stage in range(num_stages)]
    return Costs(
        forward_s=tuple(_median_of(medians, stage, Kind.F) for stage in range(num_stages)),
        input_s=tuple(inputs for inputs, _ in parts),
        weight_s=tuple(weights for _, weights in parts),
    )


def _backward(medians: Medians, stage: int) -> tuple[float, float]:
    """I and W of a stage."""
    if (stage, Kind.I) in medians:
        return medians[stage, Kind.I], _median_of(medians, stage, Kind.W)
    half = _median_of(medians, stage, Kind.B) / 2
    return half, half


def _median_of(medians: Medians, stage: int, kind: Kind) -> float:
    if (stage, kind) not in medians:
        raise EmptyTimelineError(f"the timelines hold no {kind.name} of stage {stage}")
    return medians[stage, kind]
