"""Everything that a loss is divided or multiplied by acts once, and in front of the backward.

What goes wrong elsewhere: every stage divides the gradient that comes in, so that a stage k hops
from the end learns 1/M^k too slowly; the report is divided and the gradient is not, which clipping
hides; microbatches with few valid targets, or a short last one, weigh as much as full ones; and
training code that calls the pipeline several times per optimizer step finds only the last call, or
a sum of another size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import (
    KNOWN,
    RAGGED,
    close,
    every_schedule,
    flat,
    gradients_here,
    plain_toy,
    toy_depth,
    toy_engine,
    unequal,
)
from reference import gradients_of, plain_step, same_bits, toy_batch, toy_layers
from stretto.errors import InputError
from stretto.runtime import Engine
from stretto.testing import run_ranks

NORMS = (0.003520173342391247, 0.023567825976323432, 0.10676616023143516, 0.6767300084223575)
"""Gradient norm of each of four toy layers, weight and bias."""

EACH = (0.38960835124250176, 0.49244482083750485, 0.6180199273487915, 0.708075677606282)
"""Loss of each of four microbatches of the toy batch."""


def norm_per_layer(gradients: dict[str, torch.Tensor]) -> dict[int, float]:
    """Layer → norm of the gradients of its weight and bias."""
    layers: dict[int, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        layers.setdefault(int(name.split(".")[0]), []).append(gradient.norm())
    return {layer: torch.stack(norms).norm().item() for layer, norms in layers.items()}


def compare_norms(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Loss and gradient norm per layer on every schedule, for several cuts of one batch."""
    wrong: list[str] = []
    for m in (1, 2, 4, 8):
        for name, schedule in every_schedule(num_ranks, m):
            depth = toy_depth(schedule)
            engine = toy_engine(rank, group, schedule)
            result = engine.step(*toy_batch(8))
            plain = norm_per_layer(plain_toy(depth, 8, m).gradients)
            for layer, norm in norm_per_layer(gradients_here(engine)).items():
                if not close(norm, NORMS[layer] if depth == 4 else plain[layer]):
                    wrong.append(f"{name}, m={m}, layer {layer}: {norm}")
            norm = engine.clip_grad_norm_(1e9).item()
            if not (close(result.loss, KNOWN[depth][0]) and close(norm, KNOWN[depth][1])):
                wrong.append(f"{name}, m={m}: loss {result.loss}, norm {norm}")
            if m == 4 and depth == 4:
                pairs = zip(result.microbatch_losses.tolist(), EACH, strict=True)
                wrong += [f"{name}: {found}" for found, each in pairs if not close(found, each)]
            engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_do_not_depend_on_the_numbers_of_stages_and_microbatches(num_ranks: int) -> None:
    """The norm of every layer is the plain one however the same batch is cut and placed."""
    assert flat(run_ranks(compare_norms, num_ranks, num_ranks, transport="sockets")) == []


def summed_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is a sum."""
    return ((output - target) ** 2).sum()


def compare_normalised(rank: int, group: Any) -> list[str]:
    """A sum of squares with the count of elements as normaliser, given in several forms."""
    wrong: list[str] = []
    for count in (32, 32.0, torch.tensor(32), torch.tensor(32.0)):
        for name, schedule in every_schedule(2, 4):
            depth = toy_depth(schedule)
            engine = toy_engine(rank, group, schedule, loss_fn=summed_squares)
            here = count if rank == engine.loss_rank else None
            loss = engine.step(*toy_batch(8), normaliser=here).loss
            norm = engine.clip_grad_norm_(1e9)
            if not (close(loss, KNOWN[depth][0]) and close(norm, KNOWN[depth][1])):
                wrong.append(f"{name}, {count!r}: loss {loss}, norm {norm}")
            evaluated = engine.eval_step(*toy_batch(8), normaliser=here, num_microbatches=2).loss
            if not close(evaluated, KNOWN[depth][0]):
                wrong.append(f"{name}, {count!r}: evaluation {evaluated}")
            engine.close()
    return wrong


def test_a_normaliser_divides_loss_and_gradient_alike() -> None:
    """A sum divided by 32 gives the mean's loss and norm; only the loss's rank need know it."""
    assert flat(run_ranks(compare_normalised, 2, transport="sockets")) == []


class Weighted(nn.Module):
    """One weight per row, so that a row's gradient is known."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


def masked_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The sum of the outputs whose target counts; those of -100 are left out."""
    return output[target != -100].sum()


ROWS = torch.tensor([[2.0], [50.0]] + [[10.0]] * 9, dtype=torch.float64).squeeze(1)
COUNTED = torch.tensor([0, -100] + [0] * 9)
"""Of two ready-made microbatches the first has one valid target and sum 2, the second 9 and 90."""


def compare_counts(rank: int, group: Any) -> list[str]:
    """Microbatches with other numbers of valid targets, and with none."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 2):
        modules = {s: Weighted(1.0) for s in schedule.placement.stages_of(rank)}
        engine = Engine(modules, schedule, loss_fn=masked_sum, group=group)
        cuts = [(ROWS[:2], COUNTED[:2]), (ROWS[2:], COUNTED[2:])]
        result = engine.step([x for x, _ in cuts], [t for _, t in cuts], normaliser=10)
        if not (close(result.loss, 9.2) and result.microbatch_losses.tolist() == [2.0, 90.0]):
            wrong.append(f"{name}: {result.loss} {result.microbatch_losses}")
        # every factor is 1, so the loss is as steep in each of them as it is high
        for module in modules.values():
            if not close(module.factor.grad, 9.2):
                wrong.append(f"{name}: gradient {module.factor.grad}")
            module.factor.grad = None
        evaluated = sum(engine.eval_step(x, t, normaliser=10).loss.item() for x, t in cuts)
        if not close(evaluated, 9.2):
            wrong.append(f"{name}: validation {evaluated}")
        nothing = torch.full((9,), -100)
        result = engine.step([ROWS[:2], ROWS[2:]], [COUNTED[:2], nothing], normaliser=1)
        grads = [module.factor.grad.item() for module in modules.values()]
        if result.loss.item() != 2.0 or grads != [2.0] * len(grads):
            wrong.append(f"{name}: without targets {result.loss} {grads}")
        engine.close()
    return wrong


def test_microbatches_weigh_by_their_valid_targets() -> None:
    """2 over 1 target and 90 over 9 make 9.2, in training and validation; no target adds 0."""
    assert flat(run_ranks(compare_counts, 2, transport="sockets")) == []


def compare_ragged(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Batches that the number of microbatches does not divide, too small ones, full ones again."""
    wrong: list[str] = []
    inputs, targets = toy_batch(10)
    for name, schedule in every_schedule(num_ranks, 4):
        engine = toy_engine(rank, group, schedule)
        plain = plain_toy(toy_depth(schedule), 10, 4)
        squares = sum(norm**2 for norm in norm_per_layer(plain.gradients).values())
        loss, norm = RAGGED if toy_depth(schedule) == 4 else (plain.loss.item(), squares**0.5)
        for sizes in (None, [3, 3, 3, 1], [1, 7, 1, 1]):
            batch = (inputs, targets)
            if sizes is not None:
                batch = (list(inputs.split(sizes)), list(targets.split(sizes)))
            found = engine.step(*batch).loss, engine.clip_grad_norm_(1e9)
            if not (close(found[0], loss) and close(found[1], norm)):
                wrong.append(f"{name}, {sizes}: {found}")
            for stage in engine.stages.values():
                stage.zero_grad()
        engine.step(*toy_batch(10))
        wrong += [f"{name}: {one}" for one in unequal(engine, plain_toy_of(schedule, 10))]
        for stage in engine.stages.values():
            stage.zero_grad()
        try:
            engine.step(*toy_batch(3))
            wrong.append(f"{name}: 3 rows for 4 microbatches were taken")
        except InputError as error:
            if "3 rows for 4 microbatches" not in str(error):
                wrong.append(f"{name}: {error}")
        if gradients_here(engine):
            wrong.append(f"{name}: a refused batch left gradients")
        loss = engine.step(*toy_batch(8)).loss
        if not close(loss, KNOWN[toy_depth(schedule)][0]):
            wrong.append(f"{name}: the full batch after it gives {loss}")
        wrong += [f"{name}: {one}" for one in unequal(engine, plain_toy_of(schedule, 8))]
        engine.close()
    return wrong


def plain_toy_of(schedule: Any, rows: int) -> dict[str, torch.Tensor]:
    """The plain run's gradients for the toy model of a schedule."""
    return plain_toy(toy_depth(schedule), rows, schedule.num_microbatches).gradients


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_uneven_microbatches_weigh_by_their_rows(num_ranks: int) -> None:
    """Ten rows give their known numbers however cut; three are refused, and all goes on."""
    assert flat(run_ranks(compare_ragged, num_ranks, num_ranks, transport="sockets")) == []


def compare_accumulated(rank: int, group: Any) -> list[str]:
    """Three calls of unequal batches before one optimizer step, against plain accumulation."""
    wrong: list[str] = []
    sizes = (8, 12, 7)
    for name, schedule in every_schedule(2, 4):
        depth = toy_depth(schedule)
        # a mean over all three batches: each call counts by its share of the rows
        engine = toy_engine(rank, group, schedule, loss_fn=summed_squares)
        model = nn.Sequential(*toy_layers(depth))
        reported = 0.0
        for rows in sizes:
            inputs, targets = toy_batch(rows)
            reported += engine.step(inputs, targets, normaliser=4 * sum(sizes)).loss.item()
            for x, t in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
                (summed_squares(model(x), t) / (4 * sum(sizes))).backward()
        wrong += [f"{name}: {one}" for one in unequal(engine, gradients_of(model))]
        joined = [torch.cat(parts) for parts in zip(*map(toy_batch, sizes), strict=True)]
        whole = nn.Sequential(*toy_layers(depth))
        mean = nn.functional.mse_loss(whole(joined[0]), joined[1])
        mean.backward()
        if not close(reported, mean.item()):
            wrong.append(f"{name}: the calls' losses add up to {reported}, not {mean}")
        here = gradients_here(engine)
        for key, gradient in here.items():
            torch.testing.assert_close(gradient, gradients_of(whole)[key], rtol=1e-10, atol=1e-14)
        # nothing is cleared by the engine itself
        engine.step(*toy_batch(8), normaliser=1)
        if any(same_bits(here[key], gradient) for key, gradient in gradients_here(engine).items()):
            wrong.append(f"{name}: a further call did not add")
        engine.close()
    return wrong


def test_gradients_of_several_calls_add_up() -> None:
    """Three calls normalised by the rows of all equal one plain batch of all their rows."""
    assert flat(run_ranks(compare_accumulated, 2, transport="sockets")) == []


def compare_loss_scales(rank: int, group: Any) -> list[str]:
    """Gradients under a loss scale, and what is reported."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        expected = plain_toy_of(schedule, 8)
        for scale in (1024.0, 0.125, 1024, torch.tensor(1024.0)):
            engine = toy_engine(rank, group, schedule)
            loss = engine.step(*toy_batch(8), loss_scale=scale).loss
            if not close(loss, KNOWN[toy_depth(schedule)][0]):
                wrong.append(f"{name}, {scale}: the reported loss is {loss}")
            for stage in engine.stages.values():
                for parameter in stage.parameters():
                    parameter.grad /= scale
            wrong += [f"{name}, {scale}: {one}" for one in unequal(engine, expected)]
            engine.close()
    return wrong


def test_a_loss_scale_multiplies_gradients_once_and_no_report() -> None:
    """Gradients divided by a power of two are those without a scale, bit for bit."""
    assert flat(run_ranks(compare_loss_scales, 2, transport="sockets")) == []


def refuse(rank: int, group: Any) -> list[str]:
    """What scales that cannot be used are told, given on one rank or on all."""
    engine = toy_engine(rank, group, next(every_schedule(2, 4))[1])
    told: list[str] = []
    bad: list[dict[str, Any]] = [
        {"normaliser": 0},
        {"normaliser": -1.0},
        {"normaliser": float("nan")},
        {"normaliser": float("inf")},
        {"normaliser": "32"},
        {"normaliser": torch.ones(2)},
        {"loss_scale": 0},
        {"loss_scale": float("inf")},
        {"loss_scale": None},
    ]
    for values in bad:
        for where in (0, 1):
            try:
                engine.step(*toy_batch(8), **(values if rank == where else {}))
                told.append("nothing was raised")
            except InputError as error:
                told.append(str(error))
    if gradients_here(engine):
        told.append("gradients were left")
    told.append(f"{engine.step(*toy_batch(8)).loss.item():.6f}")
    engine.close()
    return told


def test_scales_that_are_no_positive_numbers_are_refused_on_every_rank() -> None:
    """Each mistake of one rank is named on both, and a good step follows."""
    for told in run_ranks(refuse, 2, transport="sockets"):
        for text in told[:12]:
            assert "normaliser is " in text
        for text in told[12:18]:
            assert "loss_scale is " in text
        assert told[18:] == ["0.552037"]


def test_the_comparison_sees_a_gradient_divided_twice() -> None:
    """A stage that divides once more gives other norms than the known ones."""
    model = nn.Sequential(*toy_layers(4))
    model[1].register_full_backward_hook(lambda module, given, out: tuple(g / 4 for g in given))
    plain = plain_step(model, nn.functional.mse_loss, *toy_batch(8), 4)
    norms = norm_per_layer(plain.gradients)
    assert close(norms[1], NORMS[1])
    assert close(4 * norms[0], NORMS[0])
