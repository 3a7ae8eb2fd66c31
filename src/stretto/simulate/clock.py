"""Exact times of a schedule whose costs are known.

Every rank runs its actions in order, each as soon as what it needs is there. Pairs run as their
halves, the forward first, and its output leaves before the backward starts. Transfers take no
rank time; what crosses ranks is there one hop later. Messages do not slow each other down.
"""

from __future__ import annotations

from stretto.errors import ScheduleError
from stretto.ir.action import COMPUTE, Action, Kind, StageAction
from stretto.ir.costs import Costs, Number, check_stage_count, per_stage, uniform_costs
from stretto.ir.deps import Value, describe_value, gives, needs, transfer_of
from stretto.ir.schedule import Schedule, compute_only, split_overlaps
from stretto.ir.timeline import MemoryPoint, Span, Timeline
from stretto.ir.walk import walk


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When everything runs, and what every rank holds.

    Args:
        schedule: Lowered or not; transfers in it do not change the times.
        costs: Costs per stage and hop; None for unit costs (F = I = W = 1, so B = 2).

    Returns:
        Spans of all compute actions, and of the messages where hops take time (SEND, from when
        it leaves to when it is there); exact where the costs are integers or fractions. Memory is
        one per stage and microbatch from F's start to B's (or W's) end, or the costs' bytes.

    Raises:
        ScheduleError: the orders wait for each other, or for what nobody gives.
        InputError: the costs are for another number of stages.

    Cost: linear in the number of actions.
    """
    costs = uniform_costs(schedule.num_stages) if costs is None else costs
    check_stage_count(costs, schedule.num_stages)
    plain = compute_only(split_overlaps(schedule))
    walked = walk(plain)
    if walked.blocked:
        first = walked.blocked[0]
        missing = ", ".join(describe_value(value) for value in first.missing)
        raise ScheduleError(
            f"rank {first.rank}, position {first.position}: "
            f"{plain.ranks[first.rank][first.position]} waits for ever for {missing}",
            walked.blocked,
        )
    clock = _Clock(plain, costs)
    for visit in walked.visits:
        action = plain.ranks[visit.rank][visit.position]
        assert isinstance(action, Action | StageAction)
        clock.run(visit.rank, action)
    memory = sorted(clock.memory, key=lambda point: point.rank)
    return Timeline(num_ranks=plain.num_ranks, spans=tuple(clock.spans), memory=tuple(memory))


class _Clock:
    """When each rank is free, when each value is where, and what has been recorded."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._free: list[Number] = [0] * schedule.num_ranks
        self._there: dict[tuple[int, Value], Number] = {}
        self._held: list[Number] = [0] * schedule.num_ranks
        count = schedule.num_stages
        has_bytes = bool(costs.held_bytes or costs.deferred_bytes)
        default = 0 if has_bytes else 1
        self._held_of = per_stage(costs.held_bytes, count, default)
        self._deferred_of = per_stage(costs.deferred_bytes, count, default)
        self.spans: list[Span] = []
        self.memory: list[MemoryPoint] = []

    def run(self, rank: int, action: Action | StageAction) -> None:
        schedule = self._schedule
        wanted = needs(action, schedule.num_stages, schedule.skips)
        start = max([self._free[rank], *(self._there[rank, value] for value in wanted)])
        end = start + self._costs.seconds(action)
        self._free[rank] = end
        self.spans.append(Span(rank, action, start, end))
        if not isinstance(action, Action) or action.kind not in COMPUTE:
            return
        self._hold(rank, action, start, end)
        for value in gives(action, schedule.skips):
            self._there[rank, value] = end
            self._send(rank, value, end)

    def _send(self, rank: int, value: Value, end: Number) -> None:
        peers = transfer_of(value, self._schedule)
        if peers is None:
            return
        send, receive = peers
        target = self._schedule.rank_of(receive.stage, receive.microbatch)
        stage = send.stage if send.kind is Kind.SEND_F else receive.stage
        arrival = end + self._costs.hop_seconds(rank, target, stage)
        self._there[target, value] = arrival
        if arrival > end:
            self.spans.append(Span(rank, send, end, arrival))

    def _hold(self, rank: int, action: Action, start: Number, end: Number) -> None:
        stage = action.stage
        match action.kind:
            case Kind.F:
                self._change(rank, start, self._held_of[stage])
            case Kind.B:
                self._change(rank, end, -self._held_of[stage])
            case Kind.I:
                self._change(rank, end, self._deferred_of[stage] - self._held_of[stage])
            case _:
                self._change(rank, end, -self._deferred_of[stage])

    def _change(self, rank: int, time: Number, amount: Number) -> None:
        if amount:
            self._held[rank] += amount
            self.memory.append(MemoryPoint(rank, time, self._held[rank]))
