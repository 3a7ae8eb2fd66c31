"""What a step gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stretto.ir import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of `Engine.step` or `Engine.eval_step`, on one rank.

    Args:
        loss: The loss of the batch, a float64 tensor without dimensions: the sum of the scaled
            losses of the microbatches, added in ascending order in the loss's own dtype. On
            every rank, or on `loss_rank` only if the engine was told so; None where unknown, and
            in an evaluation without targets.
        microbatch_losses: What the loss function returned for each microbatch, float64, shape
            [number of microbatches]; there and None as `loss`.
        losses: What `add_loss` reported inside the model, and further loss functions as `loss[1]`:
            name → float64, weighted over microbatches as the loss is, and added up in float64,
            ascending by microbatch, in the order of the model.
        outputs: The last stage's outputs, merged over the microbatches and detached; on
            `loss_rank` and on request only.
        input_gradients: Gradients of the batch's own tensors that require one, in the structure of
            the inputs (None elsewhere); on the first stage's rank and on request only.
        timeline: What really ran on all ranks, if the engine was recording.
        loss_rank: The rank that owns the last stage.
    """

    loss: torch.Tensor | None
    microbatch_losses: torch.Tensor | None
    losses: Mapping[str, torch.Tensor]
    outputs: Any
    input_gradients: Any
    timeline: Timeline | None
    loss_rank: int
