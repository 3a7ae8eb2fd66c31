"""How short a step can be at the least, whatever the order."""

from __future__ import annotations

from stretto.ir.action import COMPUTE, Action, Kind
from stretto.ir.costs import Costs, Number, check_stage_count, uniform_costs
from stretto.ir.schedule import Schedule


def lower_bound(schedule: Schedule, costs: Costs | None = None) -> Number:
    """A makespan that no order of these actions on this placement can beat, in seconds.

    The larger of two, for a schedule of complete steps:

    A rank's load. Let s be the lowest stage a rank owns. Nothing runs there before one microbatch
    has passed stages 0 to s-1; then all its actions run, one at a time. What follows its last one
    is at the least the rest of a backward: if the last is a B or I of a stage t, the backwards of
    t-1 to 0 (it may also be a W, after which nothing need follow). The bound takes the smallest
    head and the smallest tail that are possible, so it holds for every order.

    A microbatch's path. One microbatch passes all stages forward and back, with a hop wherever
    the rank changes.

    Args:
        schedule: Gives the actions of each rank and the placement; its order does not count.
        costs: Costs per stage and hop; None for unit costs.

    Raises:
        InputError: the costs are for another number of stages.
    """
    costs = uniform_costs(schedule.num_stages) if costs is None else costs
    check_stage_count(costs, schedule.num_stages)
    routes = {schedule.replica_of(m) for m in range(schedule.num_microbatches)}
    paths = [_Path(schedule, costs, replica) for replica in sorted(routes)]
    bounds: list[Number] = [path.whole() for path in paths]
    for rank in range(schedule.num_ranks):
        actions = [
            one for one in schedule.actions(rank) if isinstance(one, Action) and one.kind in COMPUTE
        ]
        if actions:
            load = sum(costs.seconds(action) for action in actions)
            head = min(path.head(rank) for path in paths)
            tail = min(path.tail(rank, actions) for path in paths)
            bounds.append(head + load + tail)
    return max(bounds)


class _Path:
    """The way of one microbatch through the stages of a replica."""

    def __init__(self, schedule: Schedule, costs: Costs, replica: int) -> None:
        self._ranks = schedule.placement.replicas[replica]
        self._costs = costs
        kinds = {a.kind for rank in range(schedule.num_ranks) for a in schedule.actions(rank)}
        self._back = None
        if Kind.I in kinds:
            self._back = Kind.I
        elif Kind.B in kinds:
            self._back = Kind.B

    def _seconds(self, stage: int, kind: Kind) -> Number:
        if kind is Kind.I:  # in a mix of whole and split backwards, the shorter one bounds
            return min(
                self._costs.seconds(Action(stage, Kind.I, 0)),
                self._costs.seconds(Action(stage, Kind.B, 0)),
            )
        return self._costs.seconds(Action(stage, kind, 0))

    def _hop(self, low: int, *, back: bool) -> Number:
        """Between stages low and low + 1, in either direction."""
        ends = (self._ranks[low + 1], self._ranks[low]) if back else self._ranks[low : low + 2]
        return self._costs.hop_seconds(ends[0], ends[1], low)

    def head(self, rank: int) -> Number:
        """The least time before anything can run on a rank."""
        lowest = min((s for s, owner in enumerate(self._ranks) if owner == rank), default=None)
        if lowest is None:
            return 0
        forwards = sum(self._seconds(stage, Kind.F) for stage in range(lowest))
        return forwards + sum(self._hop(low, back=False) for low in range(lowest))

    def tail(self, rank: int, actions: list[Action]) -> Number:
        """The least time after a rank's last action."""
        if self._back is None or any(action.kind is Kind.W for action in actions):
            return 0
        lowest = min((s for s, owner in enumerate(self._ranks) if owner == rank), default=0)
        backwards = sum(self._seconds(stage, self._back) for stage in range(lowest))
        return backwards + sum(self._hop(low, back=True) for low in range(lowest))

    def whole(self) -> Number:
        """One microbatch forward and back."""
        last = len(self._ranks) - 1
        total = sum(self._seconds(stage, Kind.F) for stage in range(last + 1))
        total += sum(self._hop(low, back=False) for low in range(last))
        if self._back is not None:
            total += sum(self._seconds(stage, self._back) for stage in range(last + 1))
            total += sum(self._hop(low, back=True) for low in range(last))
        return total
