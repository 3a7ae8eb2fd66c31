"""A toy model whose loss and norms were computed independently, on every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reference import toy_batch, toy_layers
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks

LAYER_NORMS = (
    0.003520173342391247,
    0.023567825976323432,
    0.10676616023143516,
    0.6767300084223575,
)
MICROBATCH_LOSSES = (
    0.38960835124250176,
    0.49244482083750485,
    0.6180199273487914,
    0.7080756776062820,
)


def run_toy(
    rank: int, group: Any, name: str, num_ranks: int, m: int, num_layers: int, rows: int
) -> dict[str, Any]:
    """One step with SGD, then a second step's loss."""
    options = {"stages_per_rank": num_layers // num_ranks} if "looped" in name else {}
    schedule = build(name, num_ranks=num_ranks, num_microbatches=m, **options)
    stages = split(toy_layers(num_layers), schedule, rank=rank)
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    inputs, targets = toy_batch(rows)
    result = engine.step(inputs, targets)
    assert result.loss is not None and result.microbatch_losses is not None
    norms = {
        int(layer): torch.stack([p.grad.norm() for p in module.parameters()]).norm().item()  # type: ignore[union-attr]  # reason: a backward has run
        for stage in stages.values()
        for layer, module in stage.named_children()
    }
    norm = engine.clip_grad_norm_(1e9).item()
    with torch.no_grad():
        for stage in stages.values():
            for parameter in stage.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    after = engine.step(inputs, targets).loss
    engine.close()
    return {
        "loss": result.loss.item(),
        "each": result.microbatch_losses.tolist(),
        "norm": norm,
        "norms": norms,
        "after": None if after is None else after.item(),
    }


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "looped_bfs"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_toy_model_gives_its_known_numbers(name: str, num_ranks: int, m: int) -> None:
    """Loss, norm per layer, whole norm and the loss after a step do not depend on p or m."""
    answers = run_ranks(run_toy, num_ranks, name, num_ranks, m, 4, 8)
    norms: dict[int, float] = {}
    for answer in answers:
        assert answer["loss"] == pytest.approx(0.5520371942587701, rel=1e-12)
        assert answer["norm"] == pytest.approx(0.6855146616313172, rel=1e-12)
        assert answer["after"] == pytest.approx(0.5062117355253754, rel=1e-12)
        norms |= answer["norms"]
    assert [norms[layer] for layer in range(4)] == pytest.approx(LAYER_NORMS, rel=1e-10)
    if m == 4:
        assert answers[0]["each"] == pytest.approx(MICROBATCH_LOSSES, rel=1e-12)


@pytest.mark.parametrize(
    ("num_layers", "rows", "loss", "norm"),
    [
        (4, 10, 0.5855505476851043, 0.6770359264365944),
        (2, 8, 0.43112814594220417, 0.7729067674697913),
        (8, 8, 0.43436812806407044, 0.6271444957753556),
    ],
)
def test_toy_model_of_other_sizes(num_layers: int, rows: int, loss: float, norm: float) -> None:
    """Uneven microbatches weigh by their rows; other depths give their own known numbers."""
    for answer in run_ranks(run_toy, 2, "one_f_one_b", 2, 4, num_layers, rows, transport="sockets"):
        assert answer["loss"] == pytest.approx(loss, rel=1e-12)
        assert answer["norm"] == pytest.approx(norm, rel=1e-12)
