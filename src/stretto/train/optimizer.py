"""AdamW for this rank's stages, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def learning_rate(
    step: int, *, num_steps: int, peak: float, warmup_share: float, final_share: float
) -> float:
    """Rise in a line to the peak, then fall along a cosine.

    Args:
        step: Number of the step, from 0.
        num_steps: Steps in the run.
        peak: The highest rate, reached at the end of the rise.
        warmup_share: Share of the steps in which it rises, in [0, 1].
        final_share: Rate at the last step, as a share of the peak, in [0, 1].

    Example:
        >>> [round(learning_rate(step, num_steps=5, peak=1.0, warmup_share=0.4, final_share=0.1), 3)
        ...  for step in range(5)]
        [0.5, 1.0, 0.775, 0.325, 0.1]
    """
    warmup = round(num_steps * warmup_share)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / max(1, num_steps - warmup)
    return peak * (final_share + (1 - final_share) * (1 + math.cos(math.pi * done)) / 2)


def make_optimizer(
    stages: Iterable[nn.Module],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over all parameters of these stages; matrices decay, biases and norms do not.

    What a parameter becomes does not depend on which others are in the same optimizer, so one
    optimizer per rank does what one for the whole model would do. A rank may have no parameters.
    """
    parameters = [each for stage in stages for each in stage.parameters() if each.requires_grad]
    matrices = [each for each in parameters if each.ndim >= 2]
    others = [each for each in parameters if each.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=betas,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
