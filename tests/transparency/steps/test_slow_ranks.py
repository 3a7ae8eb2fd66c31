"""Ranks that are slow at random moments: nothing hangs, and no bit depends on who was late.

What goes wrong elsewhere: an order of sends and receives works while small sends are buffered, and
blocks for ever once a send ends only with its receive, as with large payloads, or when one rank is
late and two neighbours wait to send to each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import every_schedule, flat, generated, gradients_here
from reference import gradients_of, same_bits
from stretto.ir import Schedule
from stretto.models import split
from stretto.passes import forward_part, lower
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.schedules.build import GENERATORS
from stretto.testing import run_ranks
from stretto.verify import verify

MSE = nn.functional.mse_loss


class Scaled(nn.Module):
    """A layer of few weights whose payload can be of any size."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1 + 0.1 * index))
        self.shift = nn.Parameter(torch.tensor(0.01 * index))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (h * self.scale + self.shift).tanh()


def run_slowly(
    rank: int, group: Any, num_ranks: int, m: int, width: int, seeds: range, most_s: float
) -> list[str]:
    """Every schedule under random sleeps; gradients equal the plain run's whatever the seed."""
    wrong: list[str] = []
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn((m, width), generator=generator) for _ in range(2))
    schedules = generated if num_ranks == 3 else every_schedule
    for name, schedule in schedules(num_ranks, m):
        layers = [Scaled(index) for index in range(schedule.num_stages)]
        model = nn.Sequential(*layers)
        for x, t in zip(inputs.split(1), targets.split(1), strict=True):
            (MSE(model(x), t) / m).backward()
        expected = {key: gradient.clone() for key, gradient in gradients_of(model).items()}
        layers = [Scaled(index) for index in range(schedule.num_stages)]
        engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group)
        draw = random.Random()

        def sleep(event: Any, draw: random.Random = draw) -> None:
            time.sleep(draw.uniform(0, most_s))

        engine.register_hook("before_forward", sleep)
        engine.register_hook("before_backward", sleep)
        for seed in seeds:
            draw.seed(f"{seed} {rank}")
            engine.step(inputs, targets)
            wrong += [
                f"{name}, seed {seed}: {key}"
                for key, gradient in gradients_here(engine).items()
                if not same_bits(gradient, expected[key])
            ]
            for stage in engine.stages.values():
                stage.zero_grad()
        engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_delays_change_no_bit(num_ranks: int) -> None:
    """Sleeps of up to 50 ms before each action, 1 KiB in a message: the plain run's bits."""
    seeds = range(3) if num_ranks == 2 else range(1)
    answers = run_ranks(run_slowly, num_ranks, num_ranks, 3, 256, seeds, 0.05, transport="gloo")
    assert flat(answers) == []


def test_large_payloads_do_not_block() -> None:
    """Four MiB a message, far more than a socket holds, with sleeps: the plain run's bits."""
    answers = run_ranks(run_slowly, 2, 2, 3, 1 << 20, range(1), 0.01, transport="gloo")
    assert flat(answers) == []


@pytest.mark.sweep
@pytest.mark.parametrize(("num_ranks", "width"), [(2, 256), (4, 256), (2, 1 << 24)])
def test_many_random_delays_change_no_bit(num_ranks: int, width: int) -> None:
    """Twenty draws of delays with 1 KiB in a message, and with 64 MiB."""
    answers = run_ranks(
        run_slowly,
        num_ranks,
        num_ranks,
        4,
        width,
        range(20),
        0.05,
        transport="gloo",
        timeout_s=3000,
    )
    assert flat(answers) == []


def all_sizes(num_ranks: int, most: int) -> Iterator[tuple[str, Schedule]]:
    """Every schedule, and its forward part, for 1 to `most` microbatches."""
    for m in range(1, most + 1):
        for name, schedule in every_schedule(num_ranks, m):
            yield f"{name}, p={num_ranks}, m={m}", schedule
            yield f"forwards of {name}, p={num_ranks}, m={m}", forward_part(schedule)


def stuck(schedules: Iterator[tuple[str, Schedule]]) -> list[str]:
    """Which schedules are refused under some rule of sending, with the first reason."""
    refused: list[str] = []
    for name, schedule in schedules:
        program = lower(schedule)
        for rule in ("buffered", "rendezvous", "blocking"):
            violations = verify(program, transport=rule)
            if violations:
                refused.append(f"{name}, {rule}: {violations[0]}")
    return refused


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_schedule_waits_in_a_circle_under_any_rule_of_sending(num_ranks: int) -> None:
    """Walked to the end where sends are buffered, take both sides, or block."""
    assert stuck(all_sizes(num_ranks, 7)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_no_schedule_of_many_sizes_waits_in_a_circle(num_ranks: int) -> None:
    """The same for up to 8 ranks and 16 microbatches."""
    assert stuck(all_sizes(num_ranks, 16)) == []


def test_a_circle_of_waits_would_be_seen() -> None:
    """Two neighbours that both send before they receive stop under blocking sends only."""
    schedule = build(next(iter(GENERATORS)), num_ranks=2, num_microbatches=2)
    program = lower(schedule)
    first, second = (list(program.actions(rank)) for rank in range(2))
    # rank 1 holds back its receives until it has sent: what it sends depends on them
    second.sort(key=lambda action: "RECV" in str(action))
    broken = program.with_ranks((tuple(first), tuple(second)))
    assert verify(broken, transport="blocking")
    assert not verify(program, transport="blocking")
