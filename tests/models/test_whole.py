"""One module that holds the whole model and is told its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reference import gradients_of, plain_step, same_bits, toy_batch, toy_layers
from stretto.errors import InputError
from stretto.ir.placement import v
from stretto.models import whole_model
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks


class Whole(nn.Module):
    """A scale, layers and a shift in one module; runs the layers it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((4,), 0.1, dtype=torch.float64))
        self.layers = nn.ModuleList(toy_layers(6))
        self.scale = nn.Parameter(torch.full((4,), 0.9, dtype=torch.float64))

    def forward(self, h: torch.Tensor, layer_range: range = range(6)) -> torch.Tensor:
        if layer_range.start == 0:
            h = h * self.scale
        for index in layer_range:
            h = self.layers[index](h)
        return h + self.shift if layer_range.stop == 6 else h


def compare(rank: int, group: Any, name: str) -> list[str]:
    """One step against the plain module, with the clipped norm; what differs."""
    options = {"stages_per_rank": 2} if name == "interleaved_1f1b" else {}
    schedule = build(name, num_ranks=2, num_microbatches=3, **options)
    module, plain = Whole(), Whole()
    stages = whole_model(module, schedule, rank=rank, num_layers=6)
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    inputs, targets = toy_batch(7)
    expected = plain_step(plain, nn.functional.mse_loss, inputs, targets, 3)
    loss = engine.step(inputs, targets).loss
    wrong = [] if same_bits(loss, expected.loss) else ["loss"]
    found = gradients_of(module)
    wrong += [n for n, g in found.items() if not same_bits(g, expected.gradients[n])]
    assert 0 < len(found) < len(expected.gradients)
    norm = engine.clip_grad_norm_(0.1)
    if not same_bits(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1)):
        wrong.append("norm")
    engine.close()
    return wrong


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b"])
def test_a_whole_module_runs_by_layer_ranges(name: str) -> None:
    """Loss, gradients and norm equal the plain module's; a rank's gradients are of its layers."""
    assert run_ranks(compare, 2, name, transport="sockets") == [[], []]


def test_stages_of_a_whole_module_cover_its_layers() -> None:
    """Ranges are consecutive, disjoint and complete, on any placement."""
    module = Whole()
    parts: dict[int, range] = {}
    for rank in range(2):
        stages = whole_model(module, v(num_ranks=2), rank=rank, num_layers=6)
        parts |= {stage: one.layers for stage, one in stages.items()}
    assert [layer for stage in sorted(parts) for layer in parts[stage]] == list(range(6))


def test_a_module_that_takes_no_range_is_refused() -> None:
    """The error names the keyword that is missing."""
    with pytest.raises(InputError, match=r"Linear\.forward takes no 'layer_range'"):
        whole_model(nn.Linear(4, 4), v(num_ranks=1), rank=0, num_layers=2)
