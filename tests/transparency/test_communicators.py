"""Every schedule under NCCL's rules, for real: between threads, in units, without tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import every_schedule, flat, generated, plain_toy, unequal
from reference import same_bits, toy_batch, toy_layers
from stretto.errors import ExecutionError
from stretto.ir import Communicators, Schedule
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


def train_and_evaluate(rank: int, group: Any, schedule: Schedule) -> list[str]:
    """Two steps and an evaluation between; what differs from the plain model in any bit."""
    depth, m = max(4, schedule.num_stages), schedule.num_microbatches
    expected = plain_toy(depth, m + 1, m)
    stages = split(toy_layers(depth), schedule, rank=rank)
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    wrong: list[str] = []
    for number in range(2):
        result = engine.step(*toy_batch(m + 1))
        wrong += [f"step {number}: {name}" for name in unequal(engine, expected.gradients)]
        if not same_bits(result.loss, expected.loss):
            wrong.append(f"step {number}: the loss is {result.loss}")
        for stage in stages.values():
            stage.zero_grad()
        if number == 0:
            engine.eval_step(*toy_batch(2 * m + 1))
    return wrong


def differing(schedule: Schedule, communicators: Communicators) -> list[str]:
    """What is wrong on any rank."""
    return flat(
        run_ranks(
            train_and_evaluate,
            schedule.num_ranks,
            schedule,
            rule="nccl",
            communicators=communicators,
            timeout_s=60,
        )
    )


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (2, 3), (3, 4), (4, 6), (5, 2), (8, 2)])
def test_schedules_run_under_nccls_rules_with_the_plain_models_bits(p: int, m: int) -> None:
    """Every generator by direction; for few ranks any placement or way of sharing."""
    for name, schedule in every_schedule(p, m) if 1 < p <= 3 else generated(p, m):
        for communicators in Communicators if p == 2 else (Communicators.PER_DIRECTION,):
            assert differing(schedule, communicators) == [], (name, communicators)


class Raises(nn.Module):
    """A layer that fails in the forward of its third microbatch."""

    calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("enough")
        return value


def fail_on_one_rank(rank: int, group: Any, schedule: Schedule) -> str:
    """What a rank raises when the layer of rank 1 does."""
    stages = split([*toy_layers(1), Raises(), *toy_layers(2)], schedule, rank=rank)
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    try:
        engine.step(*toy_batch(8))
    except ExecutionError as error:
        return str(error)
    return "nothing"


def test_an_exception_ends_the_step_on_every_rank() -> None:
    """Transfers that wait in a queue end with the name of the rank that failed."""
    schedule = one_f_one_b(num_ranks=4, num_microbatches=8)
    told = run_ranks(fail_on_one_rank, 4, schedule, rule="nccl", timeout_s=30)
    assert told == ["rank 1: 1F2 (stage 1, microbatch 2) raised ValueError: enough"] * 4


@pytest.mark.sweep
@pytest.mark.parametrize("p", range(1, 9))
def test_the_whole_grid_runs_under_nccls_rules(p: int) -> None:
    """Up to 8 ranks and 17 microbatches, sharing any way."""
    for m in range(1, 18):
        for name, schedule in every_schedule(p, m) if p > 1 else generated(p, m):
            for communicators in Communicators:
                assert differing(schedule, communicators) == [], (name, p, m, communicators)
