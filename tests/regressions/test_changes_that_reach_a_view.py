"""A stage that changes in place what it was given, while it has a view of it, too.

Seen: the first stage returned a tensor and its flat view, the second one doubled the tensor in
place. In the unsplit model the view is doubled with it. On another rank it was not, and on the same
rank it was, but its gradient did not know. Loss and gradients were wrong, and nobody was told. Such
a change is now refused; slices without a common element may be changed as before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import ExecutionError
from stretto.runtime import Engine
from stretto.schedules import looped_bfs
from stretto.testing import run_ranks


class Viewed(nn.Module):
    """Its activation beside a part of it."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.start = start

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        return h[:, :2], h[:, self.start :]


class Doubles(nn.Module):
    """Doubles the first in place."""

    def forward(self, h: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return h.mul_(2).sum() + rest.sum()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("start", [1, 2])
def test_a_change_that_would_reach_a_view_is_refused(num_ranks: int, start: int) -> None:
    """With a common column it is; without one the step runs."""

    def told(rank: int, group: Any) -> str:
        schedule = looped_bfs(
            num_ranks=num_ranks, num_microbatches=2, stages_per_rank=2 // num_ranks
        )
        made = [Viewed(start), Doubles()]
        mine = {index: made[index] for index in schedule.placement.stages_of(rank)}
        engine = Engine(mine, schedule, group=group)
        try:
            engine.step(torch.ones(2, 4))
        except ExecutionError as error:
            return str(error)
        return "nothing"

    answers = run_ranks(told, num_ranks)
    if start == 2:
        assert answers == ["nothing"] * num_ranks
    else:
        assert "1F0 (stage 1, microbatch 0) raised InputError: stage 1: tensor 0" in answers[-1]
        assert "shares memory with" in answers[-1]
