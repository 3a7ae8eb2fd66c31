"""Gradients that are written over before the stage in front uses them.

Seen: a function of the user's whose backward returns one buffer, filled anew for each microbatch.
Where the stage in front was on the same rank and ran its backwards later, it used the gradient of
the last microbatch for all of them, and nobody was told. An output that is written over was refused
by name; a gradient is now, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import StageError
from stretto.runtime import Engine
from stretto.schedules import looped_bfs


class Refilled(torch.autograd.Function):
    """The identity, with one buffer for all its gradients."""

    buffer = torch.zeros(1, 3)

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return Refilled.buffer.copy_(gradients[0])


class Refills(nn.Module):
    """A stage that applies it."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return Refilled.apply(h)


def test_a_gradient_written_over_on_the_same_rank_is_refused() -> None:
    """The backward that would have used it names itself and the reason."""
    schedule = looped_bfs(num_ranks=1, num_microbatches=2, stages_per_rank=2)
    stages = {0: nn.Linear(3, 3), 1: Refills()}
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss)
    with pytest.raises(StageError, match=r"0B0 .* a gradient\[0\] was changed in place after"):
        engine.step(torch.ones(2, 3), torch.zeros(2, 3))
