"""Can ranks wait for each other in a circle?

A lowered program is run without time under one rule of sending. Which rank moves first does not
matter: a move never takes another rank's move away, so either every order of moves reaches the
end or none does, and the first one tried decides.
"""

from __future__ import annotations

from collections import deque

from stretto.ir.action import RECEIVES, SENDS, Action, AnyAction, halves
from stretto.ir.communicators import Communicators
from stretto.ir.deps import Channel, Value, carried, channel_of, describe_value, gives
from stretto.ir.schedule import Schedule
from stretto.ir.walk import item_needs
from stretto.verify.unit_waits import UnitWaits
from stretto.verify.units import UnitRun
from stretto.verify.violation import Rule, Transport, Violation, Wait


def find_deadlock(
    program: Schedule,
    transport: Transport,
    communicators: Communicators = Communicators.PER_DIRECTION,
    *,
    batched: bool = True,
) -> tuple[Wait, ...]:
    """The ranks that never end, with what each waits for; empty if the program always ends.

    Args:
        program: A lowered schedule whose transfers are complete.
        transport: The rule of sending.
        communicators: Which channels share a communicator; matters under `nccl` only, as does
            the next.
        batched: Whether the transfers between two compute actions are one unit, or each its own.

    Cost: linear in the number of actions.
    """
    return _run(program, transport, communicators, batched).waits()


def _run(
    program: Schedule, transport: Transport, communicators: Communicators, batched: bool
) -> _Run | UnitWaits:
    if transport is Transport.NCCL:
        return UnitWaits(UnitRun(program, communicators, batched))
    return _Run(program, transport)


class _Run:
    """Positions, queues and messages of a program under one rule."""

    def __init__(self, program: Schedule, transport: Transport) -> None:
        self.program = program
        self.transport = transport
        self.position = [0] * program.num_ranks
        self.there: list[set[Value]] = [set() for _ in program.ranks]
        self.queues: dict[tuple[int, Channel], deque[Action]] = {}
        self.posted: set[Action] = set()
        self.over: set[Action] = set()
        self.partner: dict[Action, tuple[int, Action]] = {}
        self._find_partners()
        self._run()

    def _find_partners(self) -> None:
        ends: dict[tuple[Value, bool], tuple[int, Action]] = {}
        for rank in range(self.program.num_ranks):
            for item in self.program.ranks[rank]:
                value = carried(item) if isinstance(item, Action) else None
                if isinstance(item, Action) and value is not None:
                    ends[value, item.kind in SENDS] = (rank, item)
        for (value, is_send), (_, action) in ends.items():
            if (value, not is_send) in ends:
                self.partner[action] = ends[value, not is_send]

    def _run(self) -> None:
        active = deque(range(self.program.num_ranks))
        waiting = set(active)
        while active:
            rank = active.popleft()
            waiting.discard(rank)
            for other in self._advance(rank):
                if other not in waiting:
                    waiting.add(other)
                    active.append(other)

    def _advance(self, rank: int) -> set[int]:
        """Run a rank as far as it gets; returns the ranks that this may have freed."""
        touched: set[int] = set()
        order = self.program.ranks[rank]
        while self.position[rank] < len(order):
            item = order[self.position[rank]]
            if isinstance(item, Action) and item.kind in SENDS | RECEIVES:
                if not set(item_needs(item, self.program)) <= self.there[rank]:
                    break
                self._post(rank, item)
                touched |= self._match(rank, item)
                if self._holds(item):
                    break
            elif not set(item_needs(item, self.program)) <= self.there[rank]:
                break
            else:
                self.there[rank].update(
                    value for one in halves(item) for value in gives(one, self.program.skips)
                )
            self.position[rank] += 1
        return touched - {rank}

    def _post(self, rank: int, action: Action) -> None:
        if action in self.posted:
            return
        self.posted.add(action)
        if self.transport is Transport.BUFFERED and action.kind in SENDS:
            self.over.add(action)
        self._queue(rank, action).append(action)

    def _queue(self, rank: int, action: Action) -> deque[Action]:
        return self.queues.setdefault((rank, channel_of(action, self.program)), deque())

    def _match(self, rank: int, action: Action) -> set[int]:
        """End all transfers that head both their queues; returns the ranks concerned."""
        touched: set[int] = set()
        todo = deque([(rank, action)])
        while todo:
            here, one = todo.popleft()
            queue = self._queue(here, one)
            while queue:
                head = queue[0]
                other_rank, other = self.partner.get(head, (here, head))
                other_queue = self._queue(other_rank, other)
                if other == head or not other_queue or other_queue[0] != other:
                    break
                queue.popleft()
                other_queue.popleft()
                self.over |= {head, other}
                receive, at = (head, here) if head.kind in RECEIVES else (other, other_rank)
                self.there[at].update(gives(receive))
                touched |= {here, other_rank}
                todo.append((other_rank, other))
        return touched

    def _holds(self, action: Action) -> bool:
        blocking = self.transport is Transport.BLOCKING and action.kind in SENDS
        return blocking and action not in self.over

    def waits(self) -> tuple[Wait, ...]:
        found: list[Wait] = []
        for rank, order in enumerate(self.program.ranks):
            if self.position[rank] < len(order):
                found.append(self._wait(rank, order[self.position[rank]]))
            else:
                left = [a for (r, _), queue in self.queues.items() if r == rank for a in queue]
                unsent = [a for a in left if a.kind in SENDS and a not in self.over]
                if unsent:
                    found.append(self._end_wait(rank, unsent[0]))
        return tuple(found)

    def _wait(self, rank: int, item: AnyAction) -> Wait:
        position = self.position[rank]
        if isinstance(item, Action) and item in self.posted:
            other_rank, other = self.partner.get(item, (rank, item))
            reason = f"its receiver: {other} on rank {other_rank} to head channel "
            reason += str(channel_of(item, self.program))
            return Wait(rank, position, str(item), reason, other_rank)
        missing = [v for v in item_needs(item, self.program) if v not in self.there[rank]]
        reason = "; ".join(describe_value(value) for value in missing)
        giver = self._giver_rank(missing[0], rank) if missing else None
        return Wait(rank, position, str(item), reason, giver)

    def _end_wait(self, rank: int, action: Action) -> Wait:
        other_rank, other = self.partner.get(action, (rank, action))
        reason = f"{other} on rank {other_rank} to take its message at the end of the step"
        return Wait(rank, len(self.program.ranks[rank]), str(action), reason, other_rank)

    def circle(self) -> tuple[int | None, tuple[str, ...]]:
        """The first rank of the circle, and the circle in words, if ranks wait in one."""
        waits = {wait.rank: wait for wait in self.waits()}
        for start in waits:
            path: list[int] = []
            rank: int | None = start
            while rank is not None and rank in waits and rank not in path:
                path.append(rank)
                rank = waits[rank].waits_for
            if rank is not None and rank in path:
                turn = path[path.index(rank) :]
                told = " -> ".join(f"rank {one} ({waits[one].action})" for one in turn)
                return turn[0], (f"the circle: {told} -> rank {turn[0]}",)
        return None, ()

    def _giver_rank(self, value: Value, rank: int) -> int | None:
        owner = self.program.rank_of(value.stage, value.microbatch)
        return None if owner == rank else owner


def deadlock_violations(
    program: Schedule,
    transport: Transport,
    communicators: Communicators = Communicators.PER_DIRECTION,
    *,
    batched: bool = True,
) -> tuple[Violation, ...]:
    """The deadlock as one violation, at the first rank of the circle; empty if there is none."""
    run = _run(program, transport, communicators, batched)
    waits = run.waits()
    if not waits:
        return ()
    by_rank = {wait.rank: wait for wait in waits}
    start, circle = run.circle()
    first = waits[0] if start is None else by_rank[start]
    lines = [
        f"rank {wait.rank} is at position {wait.position}, {wait.action}, "
        f"and waits for {wait.reason}"
        for wait in waits
    ]
    ended = sorted(set(range(program.num_ranks)) - set(by_rank))
    lines += [f"rank {rank} has ended" for rank in ended]
    sends = str(transport)
    if transport is Transport.NCCL:
        sends += f", communicators {communicators}" + ("" if batched else ", one by one")
    return (
        Violation(
            rule=Rule.DEADLOCK,
            rank=first.rank,
            position=first.position,
            action=first.action,
            problem=f"waits for ever (sends {sends})",
            remedy="\n  ".join([*lines, *circle]),
            lowered=True,
        ),
    )
