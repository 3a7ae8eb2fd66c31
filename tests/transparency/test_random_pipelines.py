"""Random models on random schedules equal their plain runs bit for bit, in real processes.

Payloads of any structure, frozen parts, parameterless and in-place layers, dropout, recompute, skip
connections over any stages, uneven microbatches, shapes that change from step to step; all
families, and random orders on random placements.
"""

from __future__ import annotations

import pytest

from random_pipelines import run_cases
from stretto.testing import run_ranks


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 6), (2, 12), (3, 11), (4, 11)])
def test_random_pipelines_equal_their_plain_runs(num_ranks: int, count: int) -> None:
    """Loss, every gradient and the norm have the plain run's bits."""
    answers = run_ranks(
        run_cases, num_ranks, num_ranks, range(count), transport="sockets", timeout_s=100
    )
    assert [one for wrong in answers for one in wrong] == []


@pytest.mark.sweep
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_many_random_pipelines_equal_their_plain_runs(num_ranks: int) -> None:
    """The same over 80 more of each size."""
    answers = run_ranks(
        run_cases, num_ranks, num_ranks, range(1000, 1080), transport="gloo", timeout_s=1800
    )
    assert [one for wrong in answers for one in wrong] == []
