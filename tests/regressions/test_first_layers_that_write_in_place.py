"""A first layer that changes its microbatch in place.

Seen: "one of the variables needed for gradient computation has been modified by an inplace
operation". Microbatches were views of one batch and shared its count of changes, so the forward of
the second one, which changed rows of its own, spoiled the backward of the first.
"""

from __future__ import annotations

import torch
from torch import nn

from reference import gradients_of, same_bits, toy_batch, toy_layer
from stretto.runtime import Engine
from stretto.schedules import gpipe


class Halving(nn.Module):
    """Halves its input in place, and keeps the result for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = toy_layer(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(0.5))


def test_a_change_of_one_microbatch_is_none_of_another() -> None:
    """Two forwards, then two backwards: the plain run's gradients."""
    x, target = toy_batch(4)
    plain = Halving()
    for piece, t in zip(x.clone().split(2), target.split(2), strict=True):
        (nn.functional.mse_loss(plain(piece), t) / 2).backward()
    module = Halving()
    schedule = gpipe(num_ranks=1, num_microbatches=2)
    Engine({0: module}, schedule, loss_fn=nn.functional.mse_loss).step(x.clone(), target)
    expected = gradients_of(plain)
    assert all(same_bits(one, expected[name]) for name, one in gradients_of(module).items())
