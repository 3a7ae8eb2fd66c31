"""Can ranks wait for each other in a circle?

A lowered program is run without time under one rule of sending. Which rank moves first does not
matter: a move never takes another rank's move away, so either every order of moves reaches the
end or none does, and the first one tried decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from stretto.ir.action import RECEIVES, SENDS, Action, AnyAction, halves
from stretto.ir.deps import Channel, Value, carried, channel_of, describe_value, gives
from stretto.ir.schedule import Schedule
from stretto.ir.walk import item_needs
from stretto.verify.violation import Rule, Transport, Violation

Communicators = Callable[[Channel], Hashable]
"""Which communicator carries a channel; channels of one communicator share a queue per rank."""


def own_communicator(channel: Channel) -> Hashable:
    """Every channel is a communicator of its own."""
    return channel


@dataclass(frozen=True, slots=True)
class Wait:
    """Where a rank stands still, and whom it waits for."""

    rank: int
    position: int
    action: str
    reason: str
    waits_for: int | None


def find_deadlock(
    program: Schedule,
    transport: Transport,
    communicator_of: Communicators = own_communicator,
) -> tuple[Wait, ...]:
    """The ranks that never end, with what each waits for; empty if the program always ends.

    Args:
        program: A lowered schedule whose transfers are complete.
        transport: The rule of sending.
        communicator_of: Which channels share a communicator; matters under rendezvous.

    Cost: linear in the number of actions.
    """
    return _Run(program, transport, communicator_of).waits()


class _Run:
    """Positions, queues and messages of a program under one rule."""

    def __init__(
        self, program: Schedule, transport: Transport, communicator_of: Communicators
    ) -> None:
        self.program = program
        self.transport = transport
        self.communicator_of = communicator_of
        self.position = [0] * program.num_ranks
        self.there: list[set[Value]] = [set() for _ in program.ranks]
        self.queues: dict[tuple[int, Hashable], deque[Action]] = {}
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
        channel = channel_of(action, self.program)
        key: Hashable = channel
        if self.transport is Transport.RENDEZVOUS:
            key = self.communicator_of(channel)
        return self.queues.setdefault((rank, key), deque())

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

    def _giver_rank(self, value: Value, rank: int) -> int | None:
        owner = self.program.rank_of(value.stage, value.microbatch)
        return None if owner == rank else owner


def deadlock_violations(
    program: Schedule,
    transport: Transport,
    communicator_of: Communicators = own_communicator,
) -> tuple[Violation, ...]:
    """The deadlock as one violation, at the first rank of the circle; empty if there is none."""
    waits = find_deadlock(program, transport, communicator_of)
    if not waits:
        return ()
    by_rank = {wait.rank: wait for wait in waits}
    circle = _circle(by_rank)
    first = by_rank[circle[0]] if circle else waits[0]
    lines = [
        f"rank {wait.rank} is at position {wait.position}, {wait.action}, "
        f"and waits for {wait.reason}"
        for wait in waits
    ]
    ended = sorted(set(range(program.num_ranks)) - set(by_rank))
    lines += [f"rank {rank} has ended" for rank in ended]
    if circle:
        path = " -> ".join(f"rank {rank} ({by_rank[rank].action})" for rank in circle)
        lines.append(f"the circle: {path} -> rank {circle[0]}")
    return (
        Violation(
            rule=Rule.DEADLOCK,
            rank=first.rank,
            position=first.position,
            action=first.action,
            problem=f"waits for ever (sends {transport})",
            remedy="\n  ".join(lines),
            lowered=True,
        ),
    )


def _circle(waits: dict[int, Wait]) -> list[int]:
    for start in waits:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank in waits and rank not in path:
            path.append(rank)
            rank = waits[rank].waits_for
        if rank is not None and rank in path:
            return path[path.index(rank) :]
    return []
