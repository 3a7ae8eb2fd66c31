"""Gradients of tensors that have no rows in some microbatch.

Seen: "Mismatch in shape: grad_output[0] has a shape of [0, 1] and output[0] has a shape of [0, 5]".
The gradient of a sum over no rows is an expanded tensor; what was left of it on the wire, one
column, was taken for the whole, since both have no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


class Positive(nn.Module):
    """Those rows of a linear layer's output whose input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x[:, 0] > 0]


class Summed(nn.Module):
    """The sum of all there is."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.sum()


def chosen_rows(rank: int, group: Any) -> list[float]:
    """The gradient of the bias, where one of two microbatches has no positive row."""
    stage = [Positive(), Summed()][rank]
    engine = Engine({rank: stage}, one_f_one_b(num_ranks=2, num_microbatches=2), group=group)
    engine.step(torch.tensor([[-1.0], [1.0]]).expand(2, 5))
    return [one for p in stage.parameters() if p.ndim == 1 for one in p.grad.tolist()]


def test_a_microbatch_of_which_no_row_is_chosen_has_a_gradient() -> None:
    """The other one's alone counts, by one half."""
    assert run_ranks(chosen_rows, 2) == [[0.5] * 5, []]
    assert run_ranks(chosen_rows, 2, transport="sockets") == [[0.5] * 5, []]
