"""A tensor that every microbatch gets whole, and that requires a gradient.

Seen: such a tensor entered the model as it was, so the step's backwards wrote into its `.grad`, or
ran into the graph it came from, a second time. With gradients of the inputs asked for, those of all
microbatches were put one behind the other, in a shape the tensor does not have.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stretto
from reference import same_bits, toy_batch
from stretto.runtime import Engine
from stretto.schedules import gpipe


class Times(nn.Module):
    """Rows times a table."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * table


@pytest.mark.parametrize("wanted", [True, False])
def test_gradients_of_what_all_microbatches_get_are_added_and_returned(wanted: bool) -> None:
    """Nothing reaches the user's tensor; the returned gradient is plain autograd's."""
    schedule = gpipe(num_ranks=1, num_microbatches=4)
    engine = Engine({0: Times()}, schedule, loss_fn=nn.functional.mse_loss)
    x, target = toy_batch(8)
    leaf = torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()
    table = leaf * 2
    batch = (x, stretto.whole(table))
    found = engine.step(batch, target, return_input_gradients=wanted).input_gradients
    assert leaf.grad is None
    if wanted:
        plain = table.detach().requires_grad_()
        for piece, t in zip(x.split(2), target.split(2), strict=True):
            (nn.functional.mse_loss(piece * plain, t) / 4).backward()
        assert found[0] is None
        assert same_bits(found[1], plain.grad)
