"""A data set that raises on one rank, and a scale that only one rank knows, as a tensor.

Seen: the rank raised, and the others waited for it until their time was up (five minutes). Only
errors of our own were told to the other ranks before a step; a data set raises others, and so did
the note of a rank whose normaliser was a tensor, as counts of tokens are.
"""

from __future__ import annotations

from typing import Any

import torch

from reference import toy_batch, toy_layers
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The sum of squared errors."""
    return ((output - target) ** 2).sum()


def step_twice(rank: int, group: Any) -> list[str]:
    """What a broken data set on rank 1 leads to, and the loss of a good step after it."""
    schedule = gpipe(num_ranks=2, num_microbatches=2)
    stages = split(toy_layers(2), schedule, rank=rank)
    engine = Engine(stages, schedule, loss_fn=summed, group=group)

    def source() -> Any:
        if rank == 1:
            raise OSError("no such sample")
        return toy_batch(8)

    told: list[str] = []
    try:
        engine.step(source)
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    count = torch.tensor(32) if rank == 1 else None
    told.append(f"{engine.step(*toy_batch(8), normaliser=count).loss.item():.6f}")
    return told


def test_an_error_of_one_ranks_data_is_told_to_all() -> None:
    """Its own error there, a quote of it here; then a step with a normaliser of one rank."""
    quote = "InputError: rank 1 refused the step: OSError: no such sample"
    told = run_ranks(step_twice, 2, timeout_s=10)
    assert told == [[quote, "0.431128"], ["OSError: no such sample", "0.431128"]]
