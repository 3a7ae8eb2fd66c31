"""The reported sum of terms that layers add, on one stage and on several.

Seen: the same terms gave sums of other last bits for p = 1 and p = 2. A stage added up its own
terms first, in their own dtype; now each term is added by itself, in the order of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stretto
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks


class Adds(nn.Module):
    """Adds a third, or a seventh, of its index to the loss."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        stretto.add_loss("term", torch.tensor((self.index + 1) / (7 if self.index % 2 else 3)))
        return h


def report(rank: int, group: Any, num_ranks: int) -> float:
    """The reported sum of eight layers' terms over three microbatches."""
    schedule = gpipe(num_ranks=num_ranks, num_microbatches=3)
    stages = split([Adds(index) for index in range(8)], schedule, rank=rank)
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    return engine.step(torch.ones(3, 2), torch.ones(3, 2)).losses["term"].item()


def test_reported_terms_do_not_depend_on_the_split() -> None:
    """One number for 1, 2 and 4 ranks."""
    told = [one for p in (1, 2, 4) for one in run_ranks(report, p, p, timeout_s=10)]
    assert len(set(told)) == 1
