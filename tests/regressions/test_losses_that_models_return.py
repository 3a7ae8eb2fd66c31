"""The loss of an evaluation where the model returns its loss itself.

Seen: training reported it, evaluation had no loss and gave the numbers as outputs, so there was no
validation loss. And a second loss function that returned a tuple of one, which is fine for the
first, ended the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reference import toy_batch
from stretto.runtime import Engine
from stretto.schedules import gpipe


class OwnLoss(nn.Module):
    """The mean of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_an_evaluation_reports_the_loss_that_the_model_returns() -> None:
    """The loss of training and evaluation is the same number."""
    engine = Engine({0: OwnLoss()}, gpipe(num_ranks=1, num_microbatches=2))
    x, _ = toy_batch(8)
    assert engine.eval_step(x).loss == engine.step(x).loss


def mean_in_tuple(output: torch.Tensor, target: Any) -> tuple[torch.Tensor]:
    """A loss in a tuple of one."""
    return (output.mean(),)


def test_further_losses_may_come_in_a_tuple_as_the_first_may() -> None:
    """Both losses are the same number."""
    schedule = gpipe(num_ranks=1, num_microbatches=2)
    engine = Engine({0: nn.Identity()}, schedule, loss_fn=[mean_in_tuple, mean_in_tuple])
    result = engine.step(*toy_batch(8))
    assert result.losses["loss[1]"] == result.loss
