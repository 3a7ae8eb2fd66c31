"""Gradients of inputs where another rank than the first one feeds the pipeline.

Seen: `input_gradients` was None throughout, without a word. The batch that one rank sent to all
arrived without its need of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reference import same_bits, toy_batch, toy_layers
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks


def feed(rank: int, group: Any, data_rank: int | None) -> Any:
    """The gradients of the inputs that the rank gets."""
    schedule = gpipe(num_ranks=2, num_microbatches=2)
    stages = split(toy_layers(2), schedule, rank=rank)
    loss_fn = nn.functional.mse_loss
    engine = Engine(stages, schedule, loss_fn=loss_fn, group=group, data_rank=data_rank)
    x, target = toy_batch(4)
    result = engine.step(x.requires_grad_(), target, return_input_gradients=True)
    return result.input_gradients


def test_the_first_rank_gets_gradients_of_a_batch_that_was_sent_to_it() -> None:
    """They are those of a batch it was given itself."""
    found, nothing = run_ranks(feed, 2, 1, timeout_s=10)
    assert isinstance(found, torch.Tensor)
    assert same_bits(found, run_ranks(feed, 2, None, timeout_s=10)[0])
    assert nothing is None
