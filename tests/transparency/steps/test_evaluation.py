"""Evaluation before, between and after training steps, with batches of any size.

What goes wrong elsewhere: shapes and numbers of microbatches that training left behind are used for
a validation batch of another size, which then hangs, dies or is divided by the wrong count; the
next training step finds the validation's; and evaluation leaves gradients, dropout switched off,
running statistics or random numbers behind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import (
    close,
    every_schedule,
    flat,
    gradients_here,
    some_schedules,
    toy_depth,
    toy_engine,
)
from reference import gradients_of, plain_step, same_bits, toy_batch, toy_layer, toy_layers
from stretto.errors import InputError
from stretto.models import split
from stretto.runtime import Engine
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss

CALLS: tuple[tuple[str, int, int | None], ...] = (
    ("eval", 5, None),
    ("train", 8, None),
    ("eval", 4, 2),
    ("train", 8, None),
    ("eval", 6, 1),
    ("eval", 7, 7),
    ("train", 8, None),
    ("eval", 1, None),
    ("eval", 23, None),
    ("train", 12, None),
    ("eval", 10, 3),
    ("train", 12, None),
)
"""Mode, rows, and number of microbatches where it is asked for."""


def compare_calls(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Training and evaluation in turn, on every schedule, against the plain model."""
    wrong: list[str] = []
    schedules = every_schedule if num_ranks < 3 else some_schedules
    for name, schedule in schedules(num_ranks, 4):
        engine = toy_engine(rank, group, schedule)
        model = nn.Sequential(*toy_layers(toy_depth(schedule)))
        for call, (mode, rows, m) in enumerate(CALLS):
            where = f"{name}, call {call}: "
            inputs, targets = toy_batch(rows)
            if mode == "train":
                plain = plain_step(model, MSE, inputs, targets, 4)
                result = engine.step(inputs, targets)
                if not same_bits(result.loss, plain.loss):
                    wrong.append(where + f"loss {result.loss} is not {plain.loss}")
            else:
                before = gradients_here(engine)
                result = engine.eval_step(inputs, targets, num_microbatches=m, return_outputs=True)
                output = model(inputs).detach()
                if not close(result.loss, MSE(output, targets).item()):
                    wrong.append(where + f"loss {result.loss}")
                if m is not None and len(result.microbatch_losses) != m:
                    wrong.append(where + f"{len(result.microbatch_losses)} microbatches")
                if rank == engine.loss_rank:
                    torch.testing.assert_close(result.outputs, output, rtol=1e-12, atol=0)
                    if result.outputs.requires_grad or result.outputs.grad_fn is not None:
                        wrong.append(where + "outputs carry a graph")
                wrong += [where + one for one in differing_from(engine, before)]
            wrong += [where + one for one in differing_from(engine, gradients_of(model))]
            if not all(
                module.training for stage in engine.stages.values() for module in stage.modules()
            ):
                wrong.append(where + "modules were left in evaluation mode")
        if engine.step_number != sum(mode == "train" for mode, _, _ in CALLS):
            wrong.append(f"{name}: {engine.step_number} training steps")
        engine.close()
    return wrong


def modules_of(engine: Engine) -> list[nn.Module]:
    """All modules of this rank's stages."""
    return [module for stage in engine.stages.values() for module in stage.modules()]


def differing_from(engine: Engine, expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of this rank's gradients that are not these, bit for bit."""
    found = gradients_here(engine)
    return [key for key in found if key not in expected or not same_bits(found[key], expected[key])]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_evaluations_of_any_size_fit_between_training_steps(num_ranks: int) -> None:
    """Each loss is the plain model's over its own rows, and gradients add up over training only."""
    assert flat(run_ranks(compare_calls, num_ranks, num_ranks, transport="sockets")) == []


class Kept(nn.Module):
    """Normalises by running statistics, drops, and remembers how it was called."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = toy_layer(index)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.drop = nn.Dropout(0.5)
        self.calls: list[tuple[bool, bool, int]] = []

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.training, torch.is_grad_enabled(), len(h)))
        return self.drop(self.norm(self.layer(h)))


def check_untouched(rank: int, group: Any) -> list[str]:
    """State of modules, streams and gradients around evaluations; calls that were really made."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 3):
        stages = split([Kept(index) for index in range(4)], schedule, rank=rank)
        layers = [layer for stage in stages.values() for layer in stage.children()]
        engine = Engine(stages, schedule, loss_fn=MSE, group=group)
        if any(layer.calls or layer.norm.num_batches_tracked for layer in layers):
            wrong.append(f"{name}: constructing an engine ran the model")
        layers[0].norm.eval()  # frozen statistics, as a user may want them
        engine.step(*toy_batch(9))
        for layer in layers:
            if layer.calls != [(True, True, 3)] * 3:
                wrong.append(f"{name}: training called {layer.calls}")
            layer.calls.clear()
        state = [{k: v.clone() for k, v in stage.state_dict().items()} for stage in stages.values()]
        gradients = gradients_here(engine)
        modes = [module.training for module in modules_of(engine)]
        stream = torch.get_rng_state()
        first = engine.eval_step(*toy_batch(7), num_microbatches=2).loss
        second = engine.eval_step(*toy_batch(7), num_microbatches=2).loss
        if not same_bits(first, second):
            wrong.append(f"{name}: two evaluations give {first} and {second}")
        for layer in layers:
            if layer.calls != [(False, False, 4), (False, False, 3)] * 2:
                wrong.append(f"{name}: evaluation called {layer.calls}")
        if not torch.equal(stream, torch.get_rng_state()):
            wrong.append(f"{name}: the random stream moved")
        if modes != [module.training for module in modules_of(engine)]:
            wrong.append(f"{name}: modes changed")
        for stage, kept in zip(stages.values(), state, strict=True):
            wrong += [
                f"{name}: {key} changed"
                for key, value in stage.state_dict().items()
                if not same_bits(value, kept[key])
            ]
        wrong += [f"{name}: {one}" for one in differing_from(engine, gradients)]
        try:
            engine.eval_step(torch.ones(2, 4, dtype=torch.float64), torch.ones(3, 4))
            wrong.append(f"{name}: other rows than targets were taken")
        except InputError:
            if modes != [module.training for module in modules_of(engine)]:
                wrong.append(f"{name}: a refused evaluation changed modes")
        engine.close()
    return wrong


def test_evaluation_changes_nothing_and_runs_each_layer_once_per_microbatch() -> None:
    """Modes, buffers, gradients and the random stream stay; no layer runs but in a microbatch."""
    assert flat(run_ranks(check_untouched, 2, transport="sockets")) == []


def evaluate_oddly(rank: int, group: Any) -> list[Any]:
    """Evaluations without targets, under no_grad, in lists, and ones that are refused."""
    engine = toy_engine(rank, group, next(every_schedule(2, 4))[1])
    inputs, targets = toy_batch(8)
    found: list[Any] = []
    found.append(engine.eval_step(inputs))
    with torch.no_grad():
        found.append(engine.eval_step(inputs, targets, return_outputs=True))
    with torch.inference_mode():
        found.append(engine.eval_step(inputs, targets, return_outputs=True))
    found.append(engine.eval_step(list(inputs.split([5, 3])), targets))
    found.append(engine.eval_step(inputs if rank == 0 else None, targets if rank == 1 else None))
    told: list[str] = []
    for options in (
        {"num_microbatches": 9},
        {"num_microbatches": 0},
        {"num_microbatches": 1 + rank},
    ):
        try:
            engine.eval_step(inputs, targets, **options)
        except InputError as error:
            told.append(str(error))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            try:
                engine.step(inputs, targets)
            except InputError as error:
                told.append(str(error))
    try:
        if rank == 0:
            engine.step(inputs, targets)
        else:
            engine.eval_step(inputs, targets)
    except InputError as error:
        told.append(str(error))
    told.append(f"{engine.step(inputs, targets).loss.item():.6f}")
    engine.close()
    return [
        [None if one.loss is None else one.loss.item() for one in found],
        [None if one.outputs is None else one.outputs.clone() for one in found],
        told,
    ]


def test_evaluations_without_targets_in_lists_or_refused() -> None:
    """Without targets there are outputs and no loss; what cannot be run is named everywhere."""
    inputs, targets = toy_batch(8)
    output = nn.Sequential(*toy_layers(4))(inputs).detach()
    loss = MSE(output, targets).item()
    for rank, (losses, outputs, told) in enumerate(
        run_ranks(evaluate_oddly, 2, transport="sockets")
    ):
        assert losses[0] is None
        assert losses[1:] == pytest.approx([loss] * 4, rel=1e-12)
        for one in outputs[:3]:
            if rank == 1:
                torch.testing.assert_close(one, output, rtol=1e-12, atol=0)
        assert [one is None for one in outputs] == [rank == 0] * 3 + [True] * 2
        assert "8 rows for 9 microbatches" in told[0]
        assert "num_microbatches is 0" in told[1]
        assert "do not agree on num_microbatches" in told[2]
        assert "step needs gradients" in told[3]
        assert "step needs gradients" in told[4]
        assert "do not agree on what is called (rank 0: step 0, rank 1: an evaluation)" in told[5]
        assert told[6] == "0.552037"
