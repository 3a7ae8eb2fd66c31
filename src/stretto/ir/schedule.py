"""The schedule: what every rank runs and in which order. No holes, no time.

A schedule does not prove itself: `verify` does that. Only what would make it meaningless
(indices outside the model or the step) is refused here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stretto.errors import InputError
from stretto.ir.action import COMPUTE, Action, AnyAction, Overlap, StageAction, halves
from stretto.ir.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Values that go from a stage straight to later ones, past those in between.

    Args:
        source: The stage that makes them.
        targets: The stages that use them, ascending, all after the source.

    Raises:
        InputError: there is no target, or they are not ascending or not after the source.
    """

    source: int
    targets: tuple[int, ...]

    def __post_init__(self) -> None:
        chain = (self.source, *self.targets)
        ascending = all(left < right for left, right in itertools.pairwise(chain))
        if not self.targets or self.source < 0 or not ascending:
            raise InputError(
                f"a skip from stage {self.source} to stages {list(self.targets)}: its targets must "
                "be ascending and after the source, at least one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Placement, number of microbatches, and one tuple of actions per rank.

    A schedule with transfers in it (SEND, RECV, FREE) is called lowered; the passes make it.

    Args:
        placement: Stage → rank.
        num_microbatches: Pieces the batch of a step is cut into, at least 1.
        ranks: For each rank its actions, in the order it runs them.
        replica_of_microbatch: With several replicas, the replica each microbatch runs through;
            empty means replica 0 for all.
        skips: The model's skip connections between stages; dependencies like any other.

    Raises:
        InputError: a count or an index is out of range.
    """

    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[AnyAction, ...], ...]
    replica_of_microbatch: tuple[int, ...] = ()
    skips: tuple[Skip, ...] = ()

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise InputError(
                f"num_microbatches is {self.num_microbatches}; a step needs at least 1"
            )
        if len(self.ranks) != self.placement.num_ranks:
            raise InputError(
                f"the schedule has orders for {len(self.ranks)} ranks, its placement has "
                f"{self.placement.num_ranks}; each rank needs exactly one order"
            )
        routes = self.replica_of_microbatch
        if routes and len(routes) != self.num_microbatches:
            raise InputError(
                f"replica_of_microbatch names {len(routes)} microbatches of {self.num_microbatches}"
            )
        if routes and not set(routes) <= set(range(self.placement.num_replicas)):
            raise InputError(
                f"replica_of_microbatch names replicas {sorted(set(routes))}; the placement has "
                f"{self.placement.num_replicas}"
            )
        for skip in self.skips:
            if skip.targets[-1] >= self.placement.num_stages:
                raise InputError(
                    f"a skip goes to stage {skip.targets[-1]}, outside "
                    f"0..{self.placement.num_stages - 1}"
                )
        for rank, order in enumerate(self.ranks):
            for position, item in enumerate(order):
                for action in halves(item):
                    complaint = self._complaint(action)
                    if complaint is not None:
                        where = f"rank {rank}, position {position}: {action}"
                        raise InputError(f"{where} names {complaint}")

    def _complaint(self, action: Action | StageAction) -> str | None:
        if action.stage >= self.placement.num_stages:
            return f"a stage outside 0..{self.placement.num_stages - 1}"
        if isinstance(action, Action) and action.microbatch >= self.num_microbatches:
            return f"a microbatch outside 0..{self.num_microbatches - 1}"
        return None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return self.placement.num_stages

    def replica_of(self, microbatch: int) -> int:
        """The replica of the stages that this microbatch runs through."""
        return self.replica_of_microbatch[microbatch] if self.replica_of_microbatch else 0

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank on which this stage works on this microbatch."""
        return self.placement.replicas[self.replica_of(microbatch)][stage]

    def actions(self, rank: int) -> Iterator[Action | StageAction]:
        """A rank's single actions in order; the halves of a pair one after the other."""
        for item in self.ranks[rank]:
            yield from halves(item)

    @property
    def is_lowered(self) -> bool:
        """Whether transfers are part of the orders."""
        return any(
            isinstance(item, Action) and item.kind not in COMPUTE
            for order in self.ranks
            for item in order
        )

    def with_ranks(self, ranks: tuple[tuple[AnyAction, ...], ...]) -> Schedule:
        """The same schedule with other orders."""
        return replace(self, ranks=ranks)


def split_overlaps(schedule: Schedule) -> Schedule:
    """Replace every pair by its forward half followed by its backward half."""
    if not any(isinstance(item, Overlap) for order in schedule.ranks for item in order):
        return schedule
    return schedule.with_ranks(
        tuple(tuple(schedule.actions(rank)) for rank in range(schedule.num_ranks))
    )


def compute_only(schedule: Schedule) -> Schedule:
    """The schedule without transfers: what lowering started from."""
    return schedule.with_ranks(
        tuple(
            tuple(item for item in order if not isinstance(item, Action) or item.kind in COMPUTE)
            for order in schedule.ranks
        )
    )
