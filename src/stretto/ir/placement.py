"""Which rank owns which stage.

A placement is a map from stages to ranks and nothing else: no order, no layers, no devices.
Bidirectional schedules keep two replicas of every stage; each replica is a map of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stage → rank, for one replica of the stages or for several.

    Args:
        num_ranks: Number of ranks, at least 1.
        replicas: For each replica the rank of every stage, from stage 0 on.

    Raises:
        PlacementError: no stage, a rank out of range or without a stage, replicas of different
            length, or two replicas of a stage on one rank.
    """

    num_ranks: int
    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlacementError(f"num_ranks is {self.num_ranks}; a placement needs at least 1")
        if not self.replicas or not self.replicas[0]:
            raise PlacementError("a placement needs at least one stage")
        if len({len(ranks) for ranks in self.replicas}) != 1:
            raise PlacementError("every replica must place the same number of stages")
        owners = {rank for ranks in self.replicas for rank in ranks}
        if not owners <= set(range(self.num_ranks)):
            outside = sorted(owners - set(range(self.num_ranks)))
            raise PlacementError(f"ranks {outside} are not in 0..{self.num_ranks - 1}")
        if len(owners) < self.num_ranks:
            idle = sorted(set(range(self.num_ranks)) - owners)
            raise PlacementError(f"ranks {idle} own no stage; every rank needs at least one")
        for stage, ranks in enumerate(zip(*self.replicas, strict=True)):
            if len(set(ranks)) != len(ranks):
                raise PlacementError(f"stage {stage} has two replicas on one rank: {ranks}")

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.replicas[0])

    @property
    def num_replicas(self) -> int:
        """Number of copies of every stage: 1, or 2 for bidirectional schedules."""
        return len(self.replicas)

    def rank_of(self, stage: int, replica: int = 0) -> int:
        """The rank that owns this stage (of this replica)."""
        if not 0 <= stage < self.num_stages:
            raise PlacementError(f"stage {stage} is not in 0..{self.num_stages - 1}")
        return self.replicas[replica][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank owns, ascending, over all replicas."""
        if not 0 <= rank < self.num_ranks:
            raise PlacementError(f"rank {rank} is not in 0..{self.num_ranks - 1}")
        return tuple(
            stage
            for stage in range(self.num_stages)
            if any(ranks[stage] == rank for ranks in self.replicas)
        )


def loop(*, num_ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod p: the line, and the loop of interleaved schedules.

    Example:
        >>> loop(num_ranks=2, stages_per_rank=2).replicas
        ((0, 1, 0, 1),)
    """
    _at_least_one("num_ranks", num_ranks)
    _at_least_one("stages_per_rank", stages_per_rank)
    ranks = tuple(range(num_ranks)) * stages_per_rank
    return Placement(num_ranks=num_ranks, replicas=(ranks,))


def v(*, num_ranks: int) -> Placement:
    """Stages r and 2p-1-r on rank r: down the ranks and back up.

    Example:
        >>> v(num_ranks=2).replicas
        ((0, 1, 1, 0),)
    """
    return wave(num_ranks=num_ranks, num_waves=1)


def wave(*, num_ranks: int, num_waves: int) -> Placement:
    """The V repeated `num_waves` times: 2 x num_waves stages per rank."""
    _at_least_one("num_ranks", num_ranks)
    _at_least_one("num_waves", num_waves)
    down = tuple(range(num_ranks))
    return Placement(num_ranks=num_ranks, replicas=((down + down[::-1]) * num_waves,))


def bidirectional(*, num_ranks: int) -> Placement:
    """Two replicas of p stages: stage s on rank s, and on rank p-1-s.

    Raises:
        PlacementError: p is odd (the middle rank would hold one stage twice).
    """
    _at_least_one("num_ranks", num_ranks)
    down = tuple(range(num_ranks))
    return Placement(num_ranks=num_ranks, replicas=(down, down[::-1]))


def custom(rank_of_stage: Sequence[int], *, num_ranks: int | None = None) -> Placement:
    """Any map: the rank of each stage, in stage order; ranks may own different numbers."""
    if not rank_of_stage:
        raise PlacementError("a placement needs at least one stage")
    ranks = tuple(rank_of_stage)
    count = max(ranks) + 1 if num_ranks is None else num_ranks
    return Placement(num_ranks=count, replicas=(ranks,))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise PlacementError(f"{name} is {value}; it must be at least 1")
