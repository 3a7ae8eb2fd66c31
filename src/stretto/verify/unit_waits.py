"""Why a program whose transfers go in units stands still: who is behind what, in which queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stretto.ir.action import RECEIVES, AnyAction
from stretto.ir.deps import Value, describe_value
from stretto.ir.walk import item_needs
from stretto.verify.units import QueuedTransfer, QueuedUnit, UnitRun
from stretto.verify.violation import Wait

_Link: TypeAlias = int | QueuedTransfer
"""What waits: a rank, where it stands in its order, or a transfer."""


@dataclass(frozen=True, slots=True)
class UnitWaits:
    """Tells what a run has left undone.

    Args:
        run: The run.
    """

    run: UnitRun

    def waits(self) -> tuple[Wait, ...]:
        """The ranks that never end, each with what it stands at and what that waits for."""
        return tuple(
            self._wait(rank)
            for rank in range(self.run.program.num_ranks)
            if self._item(rank) is not None or self._unfinished(rank) is not None
        )

    def circle(self) -> tuple[int | None, tuple[str, ...]]:
        """The first rank of the circle, and its links in words, if ranks wait in one."""
        stuck = self.waits()
        link: _Link | None = stuck[0].rank if stuck else None
        path: list[_Link] = []
        while link is not None and link not in path:
            path.append(link)
            link = self._next(link)
        if link is None:
            return None, ()
        turn = path[path.index(link) :]
        first = turn[0] if isinstance(turn[0], int) else turn[0].rank
        return first, ("the circle:", *(f"  {self._link_told(one)}" for one in turn))

    def _wait(self, rank: int) -> Wait:
        position, item = self.run.position[rank], self._item(rank)
        if item is None:
            one = self._unfinished(rank)
            assert one is not None, "a rank that has ended waits for its transfers only"
            reason = f"the end of its transfers: {_state(one)}"
            return Wait(rank, position, str(one.action), reason, _peer(one))
        missing = self._missing(rank, item)
        one = self._carrier(rank, missing)
        reason = describe_value(missing) + ("" if one is None else f": {_state(one)}")
        return Wait(rank, position, str(item), reason, None if one is None else _peer(one))

    def _next(self, link: _Link) -> _Link | None:
        """What a link waits for."""
        if not isinstance(link, int):
            return _held_by(link) if link.unit.is_posted else link.rank
        item = self._item(link)
        if item is None:
            return self._unfinished(link)
        return self._carrier(link, self._missing(link, item))

    def _link_told(self, link: _Link) -> str:
        if not isinstance(link, int):
            return f"rank {link.rank}: {_state(link)}"
        wait = self._wait(link)
        return f"rank {link} stands at position {wait.position}, {wait.action}"

    def _item(self, rank: int) -> AnyAction | None:
        order, position = self.run.program.ranks[rank], self.run.position[rank]
        return order[position] if position < len(order) else None

    def _missing(self, rank: int, item: AnyAction) -> Value:
        needed = item_needs(item, self.run.program)
        return next(value for value in needed if value not in self.run.there[rank])

    def _unfinished(self, rank: int) -> QueuedTransfer | None:
        return next((one for one in self.run.transfers[rank] if not one.is_over), None)

    def _carrier(self, rank: int, value: Value) -> QueuedTransfer | None:
        """The receive that brings a value to a rank."""
        for one in self.run.transfers[rank]:
            if one.value == value and one.action.kind in RECEIVES:
                return one
        return None


def _held_by(one: QueuedTransfer) -> QueuedTransfer | None:
    """What must be over before a posted transfer is free; once it is free, its partner."""
    if one.unit.before is not None and one.unit.before.left:
        return _head(one.unit.before)
    if one.earlier is not None and not one.earlier.is_over:
        return next(
            each for each in one.unit.transfers if not each.is_over and _same_way(each, one)
        )
    return one.partner


def _head(unit: QueuedUnit) -> QueuedTransfer:
    """The first transfer that is not over of the unit that heads the queue of this one."""
    while unit.before is not None and unit.before.left:
        unit = unit.before
    return next(one for one in unit.transfers if not one.is_over)


def _same_way(one: QueuedTransfer, other: QueuedTransfer) -> bool:
    """Whether one of them is somewhere behind the other on the way between two ranks."""
    behind: QueuedTransfer | None = one
    while behind is not None and behind is not other:
        behind = behind.later
    return behind is other


def _peer(one: QueuedTransfer) -> int | None:
    """The rank of the first transfer elsewhere that holds this one up."""
    held_by: QueuedTransfer | None = one
    while held_by is not None and held_by.rank == one.rank:
        held_by = _held_by(held_by) if held_by.unit.is_posted else None
    return None if held_by is None else held_by.rank


def _told(one: QueuedTransfer) -> str:
    return f"{one.action} (position {one.position})"


def _state(one: QueuedTransfer) -> str:
    """Where a transfer that is not over is, and what holds it up there."""
    name = f"communicator {one.unit.communicator}"
    if not one.unit.is_posted:
        return f"{_told(one)} is not on {name} before rank {one.rank} gets there"
    held_by = _held_by(one)
    if held_by is None:
        return f"{_told(one)} heads {name}, and nobody meets it"
    if held_by is one.partner:
        return f"{_told(one)} heads {name} and waits for {_told(held_by)} of rank {held_by.rank}"
    if held_by.unit is one.unit:
        return f"{_told(one)} on {name} is behind {_told(held_by)} on the same way"
    return f"{_told(one)} is behind {_told(held_by)}, the head of {name} on rank {one.rank}"
