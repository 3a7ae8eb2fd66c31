"""Parameters and modes of a model that do more, or are others, than when the engine was made.

Seen: after `load_state_dict(assign=True)` clipping took the old parameters and left the gradients
as they were; and after an evaluation, modules whose `train` does more than set a flag (as adapters
that merge their weights) stayed as evaluation had left them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import InputError
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import gpipe


class Merging(nn.Linear):
    """Adds a correction to its weights for evaluation, and takes it away for training."""

    merged = False

    def train(self, mode: bool = True) -> Any:
        with torch.no_grad():
            if mode == self.merged:
                self.weight += -1.0 if mode else 1.0
        self.merged = not mode
        return super().train(mode)


def engine_of(module: nn.Module) -> Engine:
    """An engine of one stage."""
    schedule = gpipe(num_ranks=1, num_microbatches=2)
    return Engine({0: module}, schedule, loss_fn=nn.functional.mse_loss)


def test_clipping_takes_the_parameters_there_are() -> None:
    """The model was loaded with `assign=True` in between."""
    model = nn.Linear(3, 3)
    engine = engine_of(model)
    model.load_state_dict(
        {name: one.clone() for name, one in model.state_dict().items()}, assign=True
    )
    engine.step(torch.ones(4, 3), torch.full((4, 3), 9.0))
    norm = engine.clip_grad_norm_(0.5)
    assert norm > 0.5
    assert (
        torch.nn.utils.get_total_norm(
            [one.grad for one in model.parameters() if one.grad is not None]
        )
        < 0.51
    )


def test_modes_are_set_through_the_modules_own_train() -> None:
    """And only where a module is not in the wanted mode."""
    model = nn.Sequential(Merging(3, 3), nn.Dropout())
    model[1].eval()
    layer = model[0]
    assert isinstance(layer, Merging)
    before = layer.weight.detach().clone()
    engine = engine_of(model)
    plain = nn.functional.linear(torch.ones(4, 3), before + 1.0, layer.bias)
    outputs = engine.eval_step(torch.ones(4, 3)).outputs
    assert torch.equal(outputs, plain)
    assert torch.allclose(layer.weight, before)
    assert [one.training for one in model.modules()] == [True, True, False]


class Reversed(nn.Sequential):
    """Calls its layers in another order."""

    def forward(self, x: Any) -> Any:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_a_sequential_with_its_own_forward_is_not_split() -> None:
    """Its layers would be called one after the other, which is not what it does."""
    schedule = gpipe(num_ranks=2, num_microbatches=2)
    with pytest.raises(InputError, match="Reversed has a forward of its own"):
        split(Reversed(nn.Linear(2, 3), nn.Linear(3, 2)), schedule, rank=0)


def test_a_step_within_a_step_is_refused() -> None:
    """From a hook, as an evaluation may be called by mistake."""
    engine = engine_of(nn.Linear(3, 3))
    handle = engine.register_hook("after_forward", lambda _: engine.eval_step(torch.ones(4, 3)))
    with pytest.raises(Exception, match="a step was called within a step of the same engine"):
        engine.step(torch.ones(4, 3), torch.ones(4, 3))
    handle.remove()
    engine.step(torch.ones(4, 3), torch.ones(4, 3))
