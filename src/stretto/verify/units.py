"""Runs a program whose transfers go in units over communicators that channels share.

The rule is `Transport.NCCL`. As under the other rules a move never takes another one away, so
the first order of moves that is tried decides whether the program ends. What stands still, and
why, is told by `unit_waits`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stretto.ir.action import RECEIVES, SENDS, Action, halves
from stretto.ir.communicators import Communicators, Unit, units
from stretto.ir.deps import Value, carried, channel_of, gives
from stretto.ir.schedule import Schedule
from stretto.ir.walk import item_needs

_TRANSFERS = SENDS | RECEIVES


@dataclass(slots=True, eq=False)
class QueuedUnit:
    """A unit of a rank in the queue of its communicator there.

    Args:
        communicator: The communicator.
        before: The unit in front of it in the queue, if there is one.
        left: How many of its transfers are not over.
        behind: The unit behind it.
        transfers: What it holds.
        is_posted: Whether its rank has got past it.
    """

    communicator: str
    before: QueuedUnit | None
    left: int
    behind: QueuedUnit | None = None
    transfers: list[QueuedTransfer] = field(default_factory=list["QueuedTransfer"])
    is_posted: bool = False


@dataclass(slots=True, eq=False)
class QueuedTransfer:
    """A SEND or RECV of a rank in its unit.

    Args:
        action: The action.
        rank: The rank that runs it.
        position: Where it stands in the rank's order.
        value: What it carries.
        unit: Its unit.
        earlier: The one in front of it in the unit, from and to the same ranks.
        later: The one behind it.
        partner: The RECV of a SEND, the SEND of a RECV.
        is_free: Whether nothing on its own rank holds it up.
        is_over: Whether it is over.
    """

    action: Action
    rank: int
    position: int
    value: Value | None
    unit: QueuedUnit
    earlier: QueuedTransfer | None
    later: QueuedTransfer | None = None
    partner: QueuedTransfer | None = None
    is_free: bool = False
    is_over: bool = False


class UnitRun:
    """A lowered program, run as far as it gets.

    Args:
        program: A lowered schedule whose transfers are complete.
        communicators: Which channels share a communicator.
        batched: Whether a unit holds all transfers between two compute actions, or one.
    """

    def __init__(self, program: Schedule, communicators: Communicators, batched: bool) -> None:
        self.program = program
        self.position = [0] * program.num_ranks
        self.there: list[set[Value]] = [set() for _ in program.ranks]
        self.transfers: list[list[QueuedTransfer]] = [[] for _ in program.ranks]
        self._ends_at: list[dict[int, QueuedUnit]] = [{} for _ in program.ranks]
        for rank in range(program.num_ranks):
            last: dict[str, QueuedUnit] = {}
            for unit in units(program, rank, communicators, batched=batched):
                self._queue(rank, unit, last)
        self._find_partners()
        self._run()

    def _queue(self, rank: int, unit: Unit, last: dict[str, QueuedUnit]) -> None:
        before = last.get(unit.communicator)
        queued = QueuedUnit(unit.communicator, before, len(unit.actions))
        if before is not None:
            before.behind = queued
        last[unit.communicator] = queued
        self._ends_at[rank][unit.positions[-1]] = queued
        on_way: dict[tuple[int, int], QueuedTransfer] = {}
        for position, action in zip(unit.positions, unit.actions, strict=True):
            source, target, _ = channel_of(action, self.program)
            earlier = on_way.get((source, target))
            one = QueuedTransfer(action, rank, position, carried(action), queued, earlier)
            if earlier is not None:
                earlier.later = one
            on_way[source, target] = one
            queued.transfers.append(one)
            self.transfers[rank].append(one)

    def _find_partners(self) -> None:
        every = [one for mine in self.transfers for one in mine]
        sends = {one.value: one for one in every if one.action.kind in SENDS}
        for one in every:
            if one.action.kind in RECEIVES and one.value in sends:
                one.partner = sends[one.value]
                one.partner.partner = one

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
        """Run a rank as far as it gets; returns the other ranks that were given a message."""
        touched: set[int] = set()
        order, there, ends_at = self.program.ranks[rank], self.there[rank], self._ends_at[rank]
        while self.position[rank] < len(order):
            item = order[self.position[rank]]
            if not all(value in there for value in item_needs(item, self.program)):
                break
            if isinstance(item, Action) and item.kind in _TRANSFERS:
                unit = ends_at.get(self.position[rank])
                if unit is not None:
                    unit.is_posted = True
                    if unit.before is None or not unit.before.left:
                        self._start(unit, touched)
            else:
                for action in halves(item):
                    there.update(gives(action, self.program.skips))
            self.position[rank] += 1
        return touched - {rank}

    def _start(self, unit: QueuedUnit, touched: set[int]) -> None:
        """The unit heads its queue: run all transfers that this sets free, here and elsewhere."""
        freed = deque(_first_on_their_ways(unit))
        while freed:
            one = freed.popleft()
            one.is_free = True
            other = one.partner
            if other is not None and other.is_free:
                freed.extend(self._finish(one, touched))
                freed.extend(self._finish(other, touched))

    def _finish(self, one: QueuedTransfer, touched: set[int]) -> list[QueuedTransfer]:
        """A transfer is over; returns those that it held up."""
        one.is_over = True
        if one.action.kind in RECEIVES:
            self.there[one.rank].update(gives(one.action))
            touched.add(one.rank)
        freed = [] if one.later is None else [one.later]
        unit = one.unit
        unit.left -= 1
        if not unit.left and unit.behind is not None and unit.behind.is_posted:
            freed += _first_on_their_ways(unit.behind)
        return freed


def _first_on_their_ways(unit: QueuedUnit) -> list[QueuedTransfer]:
    return [one for one in unit.transfers if one.earlier is None]
