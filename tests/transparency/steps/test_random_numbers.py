"""Dropout masks are a function of seed, step, microbatch and layer, and of nothing else.

What goes wrong elsewhere: one stream of random numbers per process serves whatever layers it holds
in whatever order they run, so masks change with the number of stages, of microbatches and the
schedule; a recomputation draws new masks, and gradients belong to another sample than the loss; and
evaluations, hooks or data loaders shift the masks of training, or the other way round.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from every_schedule import every_schedule, flat, gradients_here, toy_depth, unequal
from reference import gradients_of, same_bits, toy_batch, toy_layer
from stretto.models import build as build_model
from stretto.models import split, whole_model
from stretto.runtime import Engine, seeded_plain_run
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss
SEED = 7


class Dropping(nn.Module):
    """A toy layer with dropout, which remembers its masks.

    Args:
        index: Index of the layer.
        how: `plain`, or in which way it runs once more in the backward.
        autocast: Whether it computes in bfloat16.
    """

    def __init__(self, index: int, how: str = "plain", *, autocast: bool = False) -> None:
        super().__init__()
        self.layer = toy_layer(index, torch.float32 if autocast else torch.float64)
        self.how, self.autocast = how, autocast
        self.masks: list[torch.Tensor] = []
        self.runs = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.work(h)
        reentrant = self.how == "reentrant"
        if reentrant and not h.requires_grad:
            h = h.detach().requires_grad_()
        return checkpoint(self.work, h, use_reentrant=reentrant)

    def work(self, h: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            mask = nn.functional.dropout(torch.ones_like(h), 0.5, self.training)
            self.masks.append(mask)
            h = self.layer(nn.functional.dropout(h * mask, 0.5, self.training))
        return h.float() if self.autocast else h


def plain_dropping(depth: int, m: int, steps: range) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Gradients over some steps of the plain model, and all masks by layer."""
    model = build_model([Dropping(index) for index in range(depth)])
    for step in steps:
        inputs, targets = toy_batch(8)
        for index, (x, t) in enumerate(
            zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
        ):
            with seeded_plain_run(model, seed=SEED, step=step, microbatch=index):
                (loss_with_noise(model(x), t) / m).backward()
    return gradients_of(model), [layer.masks for layer in model.children()]


def loss_with_noise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that draws random numbers itself."""
    return MSE(output * (1 + 0.1 * torch.rand_like(output)), target)


def compare_masks(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Masks and gradients of two steps on every schedule, twice, with all sorts of disturbance."""
    wrong: list[str] = []
    for m in (1, 4) if num_ranks < 4 else (4,):
        plain = {depth: plain_dropping(depth, m, range(2)) for depth in (4, 8)}
        for name, schedule in every_schedule(num_ranks, m):
            gradients, masks = plain[toy_depth(schedule)]
            for disturbed in (False, True):
                where = f"{name}, m={m}, {'disturbed' if disturbed else 'quiet'}: "
                layers = [Dropping(index) for index in range(toy_depth(schedule))]
                stages = split(layers, schedule, rank=rank)
                engine = Engine(stages, schedule, loss_fn=loss_with_noise, group=group, seed=SEED)
                if disturbed:
                    disturb(engine, rank)
                for _ in range(2):
                    engine.step(*toy_batch(8))
                    if disturbed:
                        torch.rand(rank + 1)
                        engine.eval_step(*toy_batch(5))
                wrong += [where + one for one in unequal(engine, gradients)]
                for stage in stages.values():
                    for layer_name, layer in stage.named_children():
                        trained = [mask for mask in layer.masks if not (mask == 1).all()]
                        if not_same(trained, masks[int(layer_name)]):
                            wrong.append(where + f"masks of layer {layer_name}")
                engine.close()
    return wrong


def not_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether two sets of masks differ; a layer may see microbatches in any order."""
    return sorted(str(mask.tolist()) for mask in found) != sorted(
        str(mask.tolist()) for mask in expected
    )


def disturb(engine: Engine, rank: int) -> None:
    """Let hooks and bubbles draw from the global stream, another amount on every rank."""
    torch.manual_seed(rank)
    for location in ("before_forward", "after_forward", "before_backward", "after_backward"):
        engine.register_hook(location, lambda event: torch.rand(rank + 1))
    engine.set_bubble_hooks([lambda: torch.rand(rank + 2)] * engine.num_bubbles)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_masks_do_not_depend_on_schedule_placement_or_what_others_draw(num_ranks: int) -> None:
    """Every mask and gradient is the seeded plain run's, twice, with and without disturbance."""
    assert flat(run_ranks(compare_masks, num_ranks, num_ranks, transport="sockets")) == []


def test_masks_differ_by_step_microbatch_layer_and_seed() -> None:
    """No two masks of two steps, four microbatches and four layers are the same."""
    _, masks = plain_dropping(4, 4, range(2))
    every = [tuple(mask.flatten().tolist()) for layer in masks for mask in layer]
    # 32 masks of 8 bits would meet by chance; the first draw of each is longer below
    long: set[tuple[float, ...]] = set()
    model = build_model([nn.Dropout(0.5)] * 4)
    for seed in (7, 8):
        for step in range(2):
            for microbatch in range(4):
                with seeded_plain_run(model, seed=seed, step=step, microbatch=microbatch):
                    for layer in range(4):
                        model.before_layer(layer)
                        long.add(tuple(torch.rand(64).tolist()))
    assert len(every) == 32
    assert len(long) == 2 * 2 * 4 * 4


def leave_alone(rank: int, group: Any) -> list[str]:
    """The global stream around steps and evaluations, and with the seeding switched off."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        for how in ("plain", "recompute"):
            layers = [Dropping(index, how) for index in range(toy_depth(schedule))]
            engine = Engine(
                split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group, seed=SEED
            )
            torch.manual_seed(3)
            first = torch.rand(2)
            engine.step(*toy_batch(8))
            engine.eval_step(*toy_batch(8))
            found = torch.cat([first, torch.rand(2)])
            torch.manual_seed(3)
            if not same_bits(found, torch.rand(4)):
                wrong.append(f"{name}, {how}: the user's stream was moved")
            engine.close()
        layers = [Dropping(index) for index in range(toy_depth(schedule))]
        stages = split(layers, schedule, rank=rank)
        engine = Engine(stages, schedule, loss_fn=MSE, group=group, seed=None)
        torch.manual_seed(3)
        engine.step(*toy_batch(8))
        after = torch.get_rng_state()
        found = gradients_here(engine)
        for stage in stages.values():
            stage.zero_grad()
        torch.manual_seed(3)
        engine.step(*toy_batch(8))
        if not torch.equal(after, torch.get_rng_state()):
            wrong.append(f"{name}: without a seed, the stream does not repeat")
        wrong += [f"{name}, no seed: {one}" for one in unequal(engine, found)]
        torch.manual_seed(3)
        if torch.equal(after, torch.get_rng_state()):
            wrong.append(f"{name}: without a seed, nothing was drawn from the stream")
        engine.close()
    return wrong


def test_the_users_stream_is_left_alone_or_without_a_seed_used_as_it_is() -> None:
    """Steps and evaluations put the stream back; `seed=None` draws from it and changes nothing."""
    assert flat(run_ranks(leave_alone, 2, transport="sockets")) == []


def compare_recomputed(rank: int, group: Any) -> list[str]:
    """Gradients with and without recomputation, in two precisions, and how often layers ran."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        for autocast in (False, True) if name in ("one_f_one_b", "looped_bfs") else (False,):
            found: dict[str, dict[str, torch.Tensor]] = {}
            dtype = torch.float32 if autocast else torch.float64
            inputs, targets = (one.to(dtype) for one in toy_batch(8))
            for how in ("plain", "recompute", "reentrant"):
                layers = [
                    Dropping(index, how, autocast=autocast) for index in range(toy_depth(schedule))
                ]
                stages = split(layers, schedule, rank=rank)
                engine = Engine(stages, schedule, loss_fn=MSE, group=group, seed=SEED)
                torch.manual_seed(5)
                for _ in range(2):
                    engine.step(inputs, targets)
                if not torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state()):
                    wrong.append(f"{name}, {how}: the stream was moved")
                found[how] = gradients_here(engine)
                if how != "plain":
                    wrong += [
                        f"{name}, {autocast}, {how}: {one}"
                        for one in unequal(engine, found["plain"])
                    ]
                runs = 2 * 4 * (1 if how == "plain" else 2)
                if any(layer.runs != runs for s in stages.values() for layer in s.children()):
                    wrong.append(f"{name}, {how}: layers ran another number of times than {runs}")
                engine.close()
    return wrong


def test_recomputation_draws_the_same_masks_in_any_precision() -> None:
    """Both kinds of checkpoint, other forwards in between, run a layer twice and change no bit."""
    assert flat(run_ranks(compare_recomputed, 2, transport="sockets")) == []


class Noisy(torch.autograd.Function):
    """The identity, whose backward rounds at random."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * (1 + torch.rand_like(gradients[0]))


class NoisyBackward(nn.Module):
    """A toy layer that draws random numbers in its backward only."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = toy_layer(index)
        self.drawn: list[torch.Tensor] = []

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = Noisy.apply(self.layer(h))
        h.register_hook(lambda gradient: self.drawn.append(torch.rand(4)))
        return h


def repeat(rank: int, group: Any) -> list[str]:
    """Runs that differ in the global stream only, with a backward that draws; resumed runs."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 3):
        seen: list[dict[str, torch.Tensor]] = []
        for attempt in range(2):
            layers = [NoisyBackward(index) for index in range(toy_depth(schedule))]
            stages = split(layers, schedule, rank=rank)
            engine = Engine(stages, schedule, loss_fn=MSE, group=group, seed=SEED)
            torch.manual_seed(attempt)
            engine.step(*toy_batch(6))
            seen.append(gradients_here(engine))
            for stage in stages.values():
                for layer in stage.children():
                    if len({tuple(drawn.tolist()) for drawn in layer.drawn}) != 3:
                        wrong.append(f"{name}: microbatches draw alike in their backwards")
            engine.close()
        wrong += [f"{name}: {key}" for key in seen[0] if not same_bits(seen[0][key], seen[1][key])]
        resumed: list[dict[str, torch.Tensor]] = []
        for start in (0, 2):
            layers = [Dropping(index) for index in range(toy_depth(schedule))]
            stages = split(layers, schedule, rank=rank)
            engine = Engine(stages, schedule, loss_fn=MSE, group=group, seed=SEED)
            engine.step_number = start
            for step in range(start, 3):
                for stage in stages.values():
                    stage.zero_grad()
                engine.step(*toy_batch(6))
                assert engine.step_number == step + 1
            resumed.append(gradients_here(engine))
            engine.close()
        wrong += [
            f"{name}: resumed, {key}"
            for key in resumed[0]
            if not same_bits(resumed[0][key], resumed[1][key])
        ]
    return wrong


def test_runs_repeat_and_resume_whatever_the_global_stream_is() -> None:
    """Backwards that draw are repeatable, too; step 2 of a resumed run has step 2's masks."""
    assert flat(run_ranks(repeat, 2, transport="sockets")) == []


class AlwaysDropping(nn.Module):
    """Drops in evaluation too, as sampling models do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = toy_layer(index)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(h, 0.5, training=True))


class WholeDropping(nn.Module):
    """A model that is one module, told its layers, which says in front of which layer it is."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping(index) for index in range(depth))

    def forward(self, h: torch.Tensor, layer_range: range, before_layer: Any = None) -> Any:
        for index in layer_range:
            if before_layer is not None:
                before_layer(index)
            h = self.layers[index](h)
        return h


def sample(rank: int, group: Any, num_ranks: int) -> list[Any]:
    """Losses of evaluations that draw, before and after a step; and a whole module's gradients."""
    wrong: list[str] = []
    losses: set[tuple[float, ...]] = set()
    for name, schedule in every_schedule(num_ranks, 4):
        if schedule.num_stages > 4:
            continue
        layers = [AlwaysDropping(index) for index in range(4)]
        engine = Engine(
            split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group, seed=SEED
        )
        told = [engine.eval_step(*toy_batch(8)).loss.item() for _ in range(2)]
        engine.step(*toy_batch(8))
        told.append(engine.eval_step(*toy_batch(8)).loss.item())
        losses.add(tuple(told))
        engine.close()
        module = WholeDropping(4)
        stages = whole_model(module, schedule, rank=rank, num_layers=4)
        engine = Engine(stages, schedule, loss_fn=loss_with_noise, group=group, seed=SEED)
        engine.step(*toy_batch(8), not_named=torch.ones(8))
        plain = {f"layers.{k}": v for k, v in plain_dropping(4, 4, range(1))[0].items()}
        wrong += [
            f"{name}: whole module, {key}"
            for key, gradient in gradients_of(module).items()
            if not same_bits(gradient, plain[key])
        ]
        engine.close()
    return [wrong, losses]


def test_evaluations_that_draw_and_whole_modules_are_seeded_by_layer_too() -> None:
    """Sampling gives one loss for p = 1, 2, 4; a whole module gives the plain bits."""
    seen: set[tuple[float, ...]] = set()
    for num_ranks in (1, 2, 4):
        answers = run_ranks(sample, num_ranks, num_ranks, transport="sockets")
        assert flat([wrong for wrong, _ in answers]) == []
        for _, losses in answers:
            seen |= losses
    (losses,) = seen
    assert losses[0] == losses[1] != losses[2]
