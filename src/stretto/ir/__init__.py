"""Values: actions, placements, schedules, the dependency rule, costs, timelines, text forms.

Everything here is immutable and needs the standard library only.
"""

from stretto.ir.action import (
    COMPUTE,
    FREES,
    RECEIVES,
    SENDS,
    Action,
    AnyAction,
    Kind,
    Overlap,
    StageAction,
    StageKind,
    halves,
    parse_action,
)
from stretto.ir.arrival import order_by_arrival
from stretto.ir.costs import Costs, Link, Number, check_stage_count, parse_number, uniform_costs
from stretto.ir.deps import (
    Channel,
    Value,
    ValueKind,
    carried,
    channel_of,
    describe_value,
    gives,
    needs,
    transfer_of,
)
from stretto.ir.placement import Placement, bidirectional, custom, loop, v, wave
from stretto.ir.schedule import Schedule, compute_only, split_overlaps
from stretto.ir.timeline import (
    MemoryPoint,
    Span,
    Timeline,
    bubble_fraction,
    compute_spans,
    makespan,
    max_rank_span,
    peak_memory,
    timeline_from_grid,
)

__all__ = [
    "COMPUTE",
    "FREES",
    "RECEIVES",
    "SENDS",
    "Action",
    "AnyAction",
    "Channel",
    "Costs",
    "Kind",
    "Link",
    "MemoryPoint",
    "Number",
    "Overlap",
    "Placement",
    "Schedule",
    "Span",
    "StageAction",
    "StageKind",
    "Timeline",
    "Value",
    "ValueKind",
    "bidirectional",
    "bubble_fraction",
    "carried",
    "channel_of",
    "check_stage_count",
    "compute_only",
    "compute_spans",
    "custom",
    "describe_value",
    "gives",
    "halves",
    "loop",
    "makespan",
    "max_rank_span",
    "needs",
    "order_by_arrival",
    "parse_action",
    "parse_number",
    "peak_memory",
    "split_overlaps",
    "timeline_from_grid",
    "transfer_of",
    "uniform_costs",
    "v",
    "wave",
]
