"""The headline promise: a pipeline run equals plain accumulation bit for bit, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reference import (
    differing,
    gradients_of,
    odd_batch,
    odd_layers,
    plain_step,
    same_bits,
)
from stretto.ir import Schedule
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks

MICROBATCHES = (1, 2, 3, 5, 8)
FAMILIES: tuple[tuple[str, int], ...] = (
    ("gpipe", 1),
    ("one_f_one_b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 2),
    ("looped_bfs", 3),
)


def make(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """A schedule of a family, with the options it takes."""
    options = {} if name in ("gpipe", "one_f_one_b") else {"stages_per_rank": stages_per_rank}
    return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


def compare(group: Any, rank: int, schedule: Schedule, dtype: torch.dtype, rows: int) -> list[str]:
    """Two steps of a pipeline and of the plain model; returns what differs."""
    num_layers = schedule.num_stages + 1  # one stage has two layers
    plain = nn.Sequential(*odd_layers(num_layers, dtype))
    stages = split(odd_layers(num_layers, dtype), schedule, rank=rank, by="uniform_late")
    loss_fn = nn.functional.mse_loss
    engine = Engine(stages, schedule, loss_fn=loss_fn, group=group)
    wrong: list[str] = []
    for step in range(2):
        inputs, targets = odd_batch(rows, dtype, seed=step)
        expected = plain_step(plain, loss_fn, inputs, targets, schedule.num_microbatches)
        result = engine.step(inputs, targets)
        assert result.loss is not None and result.microbatch_losses is not None
        if not same_bits(result.loss, expected.loss):
            wrong.append(f"step {step}: loss {result.loss} != {expected.loss}")
        each = torch.stack(expected.microbatch_losses).double()
        if not same_bits(result.microbatch_losses, each):
            wrong.append(f"step {step}: microbatch losses")
        found: dict[str, torch.Tensor] = {}
        for stage in stages.values():
            found |= gradients_of(stage)
        owned = [name for stage in stages.values() for name, _ in stage.named_parameters()]
        wrong += [f"step {step}: {n}" for n in differing(found, expected.gradients, owned)]
        # gradients are left to add up over the two steps; clipped at the end
    norm = engine.clip_grad_norm_(0.01)
    if not same_bits(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01)):
        wrong.append("norm")
    clipped = gradients_of(plain)
    for stage in stages.values():
        wrong += [
            f"clipped {name}"
            for name, gradient in gradients_of(stage).items()
            if not same_bits(gradient, clipped[name])
        ]
    engine.close()
    return [f"rank {rank} {one}" for one in wrong]


def compare_all(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Every family, number of microbatches and dtype in one world of processes."""
    wrong: list[str] = []
    for name, stages_per_rank in FAMILIES:
        for num_microbatches in MICROBATCHES:
            schedule = make(name, num_ranks, stages_per_rank, num_microbatches)
            for dtype in (torch.float32, torch.float64):
                rows = 2 * num_microbatches + (1 if dtype is torch.float32 else 0)
                where = f"{name} v={stages_per_rank} m={num_microbatches} {dtype}: "
                wrong += [where + one for one in compare(group, rank, schedule, dtype, rows)]
    return wrong


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_pipelines_equal_plain_accumulation_bit_for_bit(num_ranks: int) -> None:
    """Losses, every gradient, the norm and the clipped gradients have the plain model's bits."""
    answers = run_ranks(compare_all, num_ranks, num_ranks, transport="gloo", timeout_s=230)
    assert [one for wrong in answers for one in wrong] == []


def compare_descending(rank: int, group: Any) -> list[str]:
    """The comparison with the backwards of each stage in descending order."""
    schedule = make("gpipe", 2, 1, 6)
    orders = tuple(order[:6] + order[:5:-1] for order in schedule.ranks)
    return compare(group, rank, schedule.with_ranks(orders), torch.float32, 12)


def test_the_comparison_sees_another_order_of_addition() -> None:
    """Backwards in descending order change gradients in their last bits, and the check says so."""
    answers = run_ranks(compare_descending, 2, transport="gloo")
    assert any("step 0" in one and "weight" in one for wrong in answers for one in wrong)
