"""Placements: which rank owns which stage."""

from __future__ import annotations

from itertools import product

import pytest

from stretto.errors import PlacementError
from stretto.ir import Placement
from stretto.ir.placement import bidirectional, custom, loop, v, wave


def test_loops_put_stage_s_on_rank_s_mod_p() -> None:
    """Chunk c of rank r is stage c p + r."""
    for p, stages in product(range(1, 9), range(1, 5)):
        placement = loop(num_ranks=p, stages_per_rank=stages)
        for rank in range(p):
            assert placement.stages_of(rank) == tuple(c * p + rank for c in range(stages))


def test_vs_put_stages_r_and_2p_minus_1_minus_r_on_rank_r() -> None:
    """First and last stage are on rank 0."""
    for p in range(1, 9):
        placement = v(num_ranks=p)
        for rank in range(p):
            assert placement.stages_of(rank) == tuple(sorted({rank, 2 * p - 1 - rank}))
        assert placement.rank_of(2 * p - 1) == placement.rank_of(0) == 0


def test_waves_repeat_the_v() -> None:
    """Two waves on two ranks are down, up, down, up."""
    assert wave(num_ranks=2, num_waves=2).replicas == ((0, 1, 1, 0, 0, 1, 1, 0),)


def test_two_directions_are_two_replicas() -> None:
    """Stage s on rank s and on rank p - 1 - s."""
    placement = bidirectional(num_ranks=4)
    assert placement.num_stages == 4
    assert placement.num_replicas == 2
    assert [placement.rank_of(s, 1) for s in range(4)] == [3, 2, 1, 0]
    assert placement.stages_of(0) == (0, 3)


def test_ranks_may_own_different_numbers_of_stages() -> None:
    """A custom map is taken as it is, and stages cover all ranks."""
    placement = custom([0, 0, 1, 2, 0])
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 1, 4), (2,), (3,)]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: loop(num_ranks=0), "num_ranks is 0"),
        (lambda: loop(num_ranks=2, stages_per_rank=0), "stages_per_rank is 0"),
        (lambda: wave(num_ranks=1, num_waves=0), "num_waves is 0"),
        (lambda: custom([]), "at least one stage"),
        (lambda: custom([0, 2]), r"ranks \[1\] own no stage"),
        (lambda: custom([0, 3], num_ranks=2), r"ranks \[3\] are not in 0\.\.1"),
        (lambda: bidirectional(num_ranks=3), "stage 1 has two replicas on one rank"),
        (lambda: Placement(num_ranks=1, replicas=((0,), (0, 0))), "same number of stages"),
        (lambda: loop(num_ranks=2).stages_of(2), "rank 2 is not in"),
        (lambda: loop(num_ranks=2).rank_of(2), "stage 2 is not in"),
    ],
)
def test_what_does_not_fit_is_named(make: object, told: str) -> None:
    """Each error has the numbers."""
    with pytest.raises(PlacementError, match=told):
        make()  # type: ignore[operator]  # reason: a list of functions of several types
