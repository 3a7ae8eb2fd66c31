"""A stage whose backward returns no gradient at all for its input.

Seen: a function of the user's whose backward returns None. In the unsplit model the weights before
it keep `.grad = None`; across the border of a stage they got zeros, with which an optimizer decays
weights and moves by its momentum.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks


class Blocked(torch.autograd.Function):
    """Doubles, and lets no gradient through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


class Blocking(nn.Module):
    """A stage that begins with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Blocked.apply(x))


def grads_of(rank: int, group: Any, name: str) -> dict[int, bool]:
    """Stage → whether its weight got a gradient."""
    schedule = build(name, num_ranks=2, num_microbatches=2)
    mine = {stage: (nn.Linear(3, 3), Blocking())[stage] for stage in [rank]}
    engine = Engine(mine, schedule, loss_fn=nn.functional.mse_loss, group=group)
    engine.step(torch.ones(2, 3), torch.ones(2, 3))
    return {
        index: any(one.grad is not None for one in stage.parameters())
        for index, stage in mine.items()
    }


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_what_gets_no_gradient_keeps_none(name: str) -> None:
    """As in the unsplit model."""
    assert run_ranks(grads_of, 2, name) == [{0: False}, {1: True}]
