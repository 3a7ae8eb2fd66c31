"""Every schedule there is, and orders of one's own, for what must hold on all of them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from random_pipelines import random_order
from reference import gradients_of, plain_step, same_bits, toy_batch, toy_layers
from stretto.ir import Placement, Schedule
from stretto.ir.placement import custom, v
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.schedules.build import GENERATORS

OPTIONS = {"stages_per_rank": 2, "num_waves": 1}
"""What generators take besides sizes; a new option must be given a value here."""

KNOWN = {2: (0.43112814594220417, 0.7729067674697913), 4: (0.5520371942587701, 0.6855146616313172)}
KNOWN |= {8: (0.43436812806407044, 0.6271444957753556)}
"""Layers of the toy model → loss and gradient norm of its batch of 8 rows."""

RAGGED = (0.5855505476851043, 0.6770359264365944)
"""Loss and gradient norm of four toy layers for a batch of 10 rows."""


def generated(num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """One schedule of every generator."""
    for name, generator in GENERATORS.items():
        taken = [one for one in inspect.signature(generator).parameters if one in OPTIONS]
        options = {one: OPTIONS[one] for one in taken}
        yield (
            name,
            build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options),
        )


def placements(num_ranks: int) -> Iterator[tuple[str, Placement]]:
    """Placements that no generator uses: a V, the line backwards, unequal shares."""
    yield "v", v(num_ranks=num_ranks)
    yield "backwards", custom(range(num_ranks)[::-1])
    yield "unequal", custom([*range(num_ranks), 0])


def every_schedule(num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Every generator's schedule, and an order drawn at random on each other placement."""
    yield from generated(num_ranks, num_microbatches)
    for name, placement in placements(num_ranks):
        draw = random.Random(f"{name} {num_ranks} {num_microbatches}")
        yield f"any order on {name}", random_order(draw, placement, num_microbatches)


def some_schedules(num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Three of them, for what hardly depends on the order: a line, a loop and a V."""
    chosen = ("one_f_one_b", "interleaved_1f1b", "any order on v")
    for name, schedule in every_schedule(num_ranks, num_microbatches):
        if name in chosen:
            yield name, schedule


def toy_depth(schedule: Schedule) -> int:
    """Layers of the toy model for a schedule: 4, or more if there are more stages."""
    return 4 if schedule.num_stages <= 4 else 8


def toy_engine(rank: int, group: Any, schedule: Schedule, **options: Any) -> Engine:
    """An engine on the toy model, with the mean squared error unless told otherwise."""
    stages = split(toy_layers(toy_depth(schedule)), schedule, rank=rank)
    options = {"loss_fn": nn.functional.mse_loss, **options}
    return Engine(stages, schedule, group=group, **options)


def gradients_here(engine: Engine) -> dict[str, torch.Tensor]:
    """Gradients of all stages of this rank, by the names of the unsplit model."""
    found: dict[str, torch.Tensor] = {}
    for stage in engine.stages.values():
        found |= gradients_of(stage)
    return found


def unequal(engine: Engine, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of this rank's parameters whose gradients differ from these in any bit."""
    found = gradients_here(engine)
    owned = [name for stage in engine.stages.values() for name, _ in stage.named_parameters()]
    return [
        name
        for name in owned
        if (name in found) != (name in expected)
        or (name in found and not same_bits(found[name], expected[name]))
    ]


def plain_toy(num_layers: int, rows: int, num_microbatches: int) -> Any:
    """The plain run of the toy model on its batch."""
    model = nn.Sequential(*toy_layers(num_layers))
    return plain_step(model, nn.functional.mse_loss, *toy_batch(rows), num_microbatches)


def close(found: Any, expected: float, tolerance: float = 1e-12) -> bool:
    """Whether a number is there and right up to a relative tolerance."""
    return found is not None and abs(float(found) - expected) <= tolerance * abs(expected)


def flat(answers: list[list[str]]) -> list[str]:
    """What is wrong on any rank."""
    return [f"rank {rank}: {one}" for rank, wrong in enumerate(answers) for one in wrong]
