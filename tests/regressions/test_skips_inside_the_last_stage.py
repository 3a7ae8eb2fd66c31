"""A value that skips layers inside the last stage does not reach the loss function.

Seen: the loss function was handed the layers' `WithSkips` instead of the output. A stage whose skip
values nobody outside uses now returns its plain output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto import WithSkips
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


class Makes(nn.Module):
    skip_outputs = ("early",)

    def forward(self, h: torch.Tensor) -> WithSkips:
        return WithSkips(h * 2, {"early": h})


class Uses(nn.Module):
    skip_inputs = ("early",)

    def forward(self, h: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        return h + early


def work(rank: int, group: Any) -> float:
    """One step; the last stage holds both ends of the skip."""
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    stages = split([nn.Identity(), Makes(), Uses()], schedule, rank=rank, by=[1, 2])
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    result = engine.eval_step(torch.ones(4, 3), torch.zeros(4, 3), return_outputs=True)
    if rank == 1:
        assert torch.equal(result.outputs, torch.full((4, 3), 3.0))
    return result.loss.item()


def test_the_loss_function_gets_the_plain_output() -> None:
    """1 * 2 + 1 = 3, and its square is the loss."""
    assert run_ranks(work, 2) == [9.0, 9.0]
