"""A model that is one module, with extras that it does not name, and with dropout.

Seen: every extra of a step was handed to the module, which ended with "unexpected keyword
argument"; other stages get only those they name. And its dropout was seeded by stage, so masks
changed with the split, which those of a list of layers do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.models import whole_model
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks


class Dropping(nn.Module):
    """Four layers that drop, in one module."""

    def forward(
        self, h: torch.Tensor, layer_range: range, before_layer: Any = None
    ) -> torch.Tensor:
        for index in layer_range:
            if before_layer is not None:
                before_layer(index)
            h = nn.functional.dropout(h, 0.3, self.training)
        return h


def drop(rank: int, group: Any, num_ranks: int) -> float:
    """The loss of a step that has an extra for nobody."""
    schedule = gpipe(num_ranks=num_ranks, num_microbatches=2)
    stages = whole_model(Dropping(), schedule, rank=rank, num_layers=4)
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    return engine.step(torch.ones(4, 16), torch.ones(4, 16), mask=torch.ones(4)).loss.item()


def test_extras_go_to_those_who_name_them_and_masks_do_not_depend_on_the_split() -> None:
    """One loss for 1, 2 and 4 ranks."""
    told = [one for p in (1, 2, 4) for one in run_ranks(drop, p, p, timeout_s=10)]
    assert len(set(told)) == 1
