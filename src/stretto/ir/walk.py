"""One way through a schedule: which items can run after which, rank by rank.

The walk moves in rounds. In a round every rank runs at most one compute item, and only one
whose needs were there when the round began, so the order of the walk is an order of production
in which all work lasts equally long. It knows no transfers: a value that can travel is on every
rank one round after it was made.
Passes place transfers by it, the simulator times it, the verifier asks what never runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stretto.errors import InputError
from stretto.ir.action import COMPUTE, AnyAction, Overlap, halves
from stretto.ir.deps import TRAVELS, Value, gives, needs
from stretto.ir.schedule import Schedule


class Visit(NamedTuple):
    """An item that ran: its rank, its position in the rank's order, and the round it ran in."""

    rank: int
    position: int
    round: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """An item that never runs, the first such of its rank, and the values it waits for."""

    rank: int
    position: int
    missing: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """The items in an order in which they can run, and where ranks got stuck, if they did."""

    visits: tuple[Visit, ...]
    blocked: tuple[Blocked, ...]


def item_needs(item: AnyAction, schedule: Schedule) -> tuple[Value, ...]:
    """What must be there before the item starts; a pair needs what both halves need."""
    return tuple(
        value
        for action in halves(item)
        for value in needs(action, schedule.num_stages, schedule.skips)
    )


def walk(schedule: Schedule) -> Walk:
    """Run a schedule that is not lowered, without time.

    Raises:
        InputError: the schedule has transfers.

    Cost: linear in the number of items, times the share of rounds in which ranks wait.
    """
    if schedule.is_lowered:
        raise InputError("walk: the schedule has transfers; pass compute_only(schedule)")
    state = _State(schedule)
    visits: list[Visit] = []
    round_index = 0
    while True:
        ran = [
            visit for rank in range(schedule.num_ranks) for visit in state.run(rank, round_index)
        ]
        if not ran:
            break
        visits += ran
        state.publish()
        round_index += 1
    return Walk(visits=tuple(visits), blocked=tuple(state.blocked()))


class _State:
    """Positions of the ranks and the values that are there."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.position = [0] * schedule.num_ranks
        self.there: set[tuple[int, Value]] = set()
        self.anywhere: set[Value] = set()
        self.fresh: set[Value] = set()  # made in this round

    def run(self, rank: int, round_index: int) -> Iterator[Visit]:
        order = self.schedule.ranks[rank]
        computed = False
        while self.position[rank] < len(order):
            item = order[self.position[rank]]
            is_compute = isinstance(item, Overlap) or item.kind in COMPUTE
            if (is_compute and computed) or self.missing(rank, item):
                return
            computed = computed or is_compute
            self.give(rank, item)
            yield Visit(rank, self.position[rank], round_index)
            self.position[rank] += 1

    def missing(self, rank: int, item: AnyAction) -> tuple[Value, ...]:
        values = item_needs(item, self.schedule)
        return tuple(
            value
            for value in values
            if (rank, value) not in self.there and value not in self.anywhere
        )

    def give(self, rank: int, item: AnyAction) -> None:
        for action in halves(item):
            for value in gives(action, self.schedule.skips):
                # what this rank computed is there for itself at once, for others next round
                self.there.add((rank, value))
                if value.kind in TRAVELS:
                    self.fresh.add(value)

    def publish(self) -> None:
        self.anywhere |= self.fresh
        self.fresh.clear()

    def blocked(self) -> Iterator[Blocked]:
        for rank, order in enumerate(self.schedule.ranks):
            position = self.position[rank]
            if position < len(order):
                yield Blocked(rank, position, self.missing(rank, order[position]))
