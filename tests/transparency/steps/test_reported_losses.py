"""What a step reports: the loss on every rank that wants it, and the terms born inside the model.

What goes wrong elsewhere: ranks without the last stage print -1, or crash on None after the first
log line, since the loss is taken from the last rank while the placement ends on another; a loss of
half precision is broadcast into buffers of another dtype, and the others read noise; a balance loss
made in the middle of the model is lost, works for one schedule only, or grows with the number of
stages or microbatches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stretto
from every_schedule import KNOWN, close, every_schedule, flat, gradients_here, toy_engine, unequal
from reference import gradients_of, same_bits, toy_batch, toy_layer
from stretto.errors import InputError
from stretto.models import split
from stretto.runtime import Engine
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss


def compare_delivery(rank: int, group: Any, num_ranks: int) -> list[str]:
    """The loss where it is asked for, and None where it is not, in training and evaluation."""
    wrong: list[str] = []
    for name, schedule in every_schedule(num_ranks, 4):
        loss = KNOWN[4 if schedule.num_stages <= 4 else 8][0]
        owner = schedule.placement.rank_of(schedule.num_stages - 1)
        for deliver in (True, False):
            engine = toy_engine(rank, group, schedule, deliver_loss=deliver)
            for run in (engine.step, engine.eval_step):
                result = run(*toy_batch(8))
                if not result.loss_rank == engine.loss_rank == owner:
                    wrong.append(f"{name}: loss_rank {result.loss_rank} is not {owner}")
                if deliver or rank == owner:
                    if not close(result.loss, loss) or result.loss.dtype != torch.float64:
                        wrong.append(f"{name}, {deliver}: {result.loss}")
                    if result.microbatch_losses.shape != (4,):
                        wrong.append(f"{name}, {deliver}: {result.microbatch_losses}")
                elif result.loss is not None or result.microbatch_losses is not None:
                    wrong.append(f"{name}: {result.loss} where nobody asked for it")
            engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_loss_reaches_every_rank_or_its_owner_only(num_ranks: int) -> None:
    """The owner is the rank of the last stage, wherever that is; elsewhere None, no number."""
    assert flat(run_ranks(compare_delivery, num_ranks, num_ranks, transport="sockets")) == []


class Scaled(nn.Module):
    """Has a parameter, so that there is something to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.weight


class TargetAs:
    """A loss that is what the target says, in a dtype and shape of its own."""

    dtype = torch.float32
    shape: tuple[int, ...] = ()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        moving = 0 * output.sum() if self.dtype.is_floating_point else 0
        return ((target.sum() + moving).to(self.dtype).reshape(self.shape),)


FORMS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.bfloat16, ()),
    (torch.float16, (1,)),
    (torch.float64, (1, 1)),
    (torch.int64, ()),
    (torch.float32, (1,)),
]


def compare_dtypes(rank: int, group: Any) -> list[str]:
    """Losses of several dtypes and shapes, told to every rank."""
    wrong: list[str] = []
    rows, values = torch.ones(4, 2), torch.tensor([1, 2, 1, 2])
    for name, schedule in every_schedule(3, 4):
        loss_fn = TargetAs()
        stages = {stage: Scaled() for stage in schedule.placement.stages_of(rank)}
        engine = Engine(stages, schedule, loss_fn=[loss_fn, loss_fn], group=group)
        for dtype, shape in FORMS:
            loss_fn.dtype, loss_fn.shape = dtype, shape
            result = engine.step(rows, values)
            evaluated = engine.eval_step(rows, values, num_microbatches=2).loss / 2
            found = [result.loss, result.losses["loss[1]"], evaluated]
            if any(one.item() != 1.5 or one.dtype != torch.float64 for one in found):
                wrong.append(f"{name}, {dtype}, {shape}: {found}")
            if result.microbatch_losses.tolist() != values.tolist():
                wrong.append(f"{name}, {dtype}: {result.microbatch_losses}")
        engine.close()
    return wrong


def test_losses_of_any_dtype_arrive_exact_as_float64() -> None:
    """Microbatch losses 1, 2, 1, 2 are 1.5 on every rank, from half precision and integers too."""
    assert flat(run_ranks(compare_dtypes, 3, transport="sockets")) == []


def compare_several(rank: int, group: Any) -> list[str]:
    """Three loss functions, each in turn the one that is learned from."""
    wrong: list[str] = []
    functions = [MSE, nn.functional.l1_loss, nn.functional.huber_loss]
    inputs, targets = toy_batch(10)
    for name, schedule in every_schedule(2, 4):
        depth = 4 if schedule.num_stages <= 4 else 8
        whole = [
            function(nn.Sequential(*map(toy_layer, range(depth)))(inputs), targets).item()
            for function in functions
        ]
        for index, function in enumerate(functions):
            model = nn.Sequential(*map(toy_layer, range(depth)))
            for x, t in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
                (function(model(x), t) / (10 / len(x))).backward()
            engine = toy_engine(rank, group, schedule, loss_fn=functions, loss_index=index)
            result = engine.step(inputs, targets)
            told = {**result.losses, f"loss[{index}]": result.loss}
            if [f"loss[{i}]" for i in range(3)] != sorted(told):
                wrong.append(f"{name}: {sorted(told)}")
            wrong += [
                f"{name}, {index}: loss {i} is {told[f'loss[{i}]']}"
                for i in range(3)
                if not close(told[f"loss[{i}]"], whole[i])
            ]
            wrong += [f"{name}, {index}: {one}" for one in unequal(engine, gradients_of(model))]
            for chosen in range(3):
                loss = engine.eval_step(inputs, targets, loss_index=chosen).loss
                if not close(loss, whole[chosen]):
                    wrong.append(f"{name}: evaluation of loss {chosen} is {loss}")
            if not close(engine.eval_step(inputs, targets).loss, whole[index]):
                wrong.append(f"{name}: evaluation does not take the loss of training")
            engine.close()
    return wrong


def test_one_of_several_losses_drives_the_backward_and_all_are_reported() -> None:
    """Gradients are those of the chosen one, in every bit; evaluations may choose another."""
    assert flat(run_ranks(compare_several, 2, transport="sockets")) == []


def refuse_index(rank: int, group: Any) -> list[str]:
    """What bad choices of a loss are told."""
    told: list[str] = []
    schedule = next(every_schedule(2, 2))[1]

    def attempt(call: Any) -> None:
        try:
            call()
            told.append("nothing was raised")
        except InputError as error:
            told.append(str(error))

    attempt(lambda: toy_engine(rank, group, schedule, loss_fn=[MSE, MSE], loss_index=2))
    attempt(lambda: toy_engine(rank, group, schedule, loss_fn=[MSE, MSE], loss_index=-1))
    attempt(lambda: toy_engine(rank, group, schedule, loss_fn=[MSE, MSE], loss_index=rank))
    engine = toy_engine(rank, group, schedule, loss_fn=[MSE, MSE])
    attempt(lambda: engine.eval_step(*toy_batch(8), loss_index=2))
    attempt(lambda: engine.eval_step(*toy_batch(8), loss_index=rank))
    told.append(f"{engine.step(*toy_batch(8)).loss.item():.6f}")
    engine.close()
    return told


def test_a_choice_of_a_loss_that_is_not_there_is_refused() -> None:
    """At construction or at the call, on every rank; ranks must choose alike."""
    for told in run_ranks(refuse_index, 2, transport="sockets"):
        assert "loss_index is 2; there are 2 loss functions" in told[0]
        assert "loss_index is -1; there are 2 loss functions" in told[1]
        assert "do not agree on loss_index" in told[2]
        assert "loss_index is 2; there are 2 loss functions" in told[3]
        assert "do not agree on loss_scale and loss_index" in told[4]
        assert told[5] == "0.552037"


class OwnLoss(nn.Module):
    """A last layer that takes the labels as an extra and returns the loss itself."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, h: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        output = self.inside(h)
        return output if labels is None else MSE(output, labels)


def compare_own_loss(rank: int, group: Any) -> list[str]:
    """A model that returns its loss, trained and evaluated; without labels its outputs."""
    wrong: list[str] = []
    inputs, targets = toy_batch(8)
    for name, schedule in every_schedule(2, 4):
        depth = 4 if schedule.num_stages <= 4 else 8
        layers = [*map(toy_layer, range(depth - 1)), OwnLoss(toy_layer(depth - 1))]
        model = nn.Sequential(*map(toy_layer, range(depth)))
        expected = model(inputs).detach()
        for x, t in zip(inputs.split(2), targets.split(2), strict=True):
            (MSE(model(x), t) / 4).backward()
        plain = {
            key.replace("3.", "3.inside.", 1) if key.startswith("3.") else key: gradient
            for key, gradient in gradients_of(model).items()
        }
        engine = Engine(split(layers, schedule, rank=rank), schedule, group=group)
        result = engine.step(inputs, labels=targets)
        wrong += [f"{name}: {one}" for one in unequal(engine, plain)]
        evaluated = engine.eval_step(inputs, labels=targets)
        if not (close(result.loss, KNOWN[depth][0]) and close(evaluated.loss, KNOWN[depth][0])):
            wrong.append(f"{name}: {result.loss} {evaluated.loss}")
        outputs = engine.eval_step(inputs)
        if outputs.loss is not None or outputs.microbatch_losses is not None:
            wrong.append(f"{name}: outputs were taken for a loss")
        if rank == engine.loss_rank:
            torch.testing.assert_close(outputs.outputs, expected, rtol=1e-12, atol=0)
        elif outputs.outputs is not None:
            wrong.append(f"{name}: outputs on another rank")
        engine.close()
    return wrong


def test_a_model_may_return_its_loss() -> None:
    """Without a loss function the last output is the loss, and an output of rows is none."""
    assert flat(run_ranks(compare_own_loss, 2, transport="sockets")) == []


class Balanced(nn.Module):
    """A toy layer that adds 0.01 mean(h^2) to the loss, and a second term of another name.

    Args:
        index: Index of the layer.
        recompute: Whether it runs once more in the backward.
        cut: Whether it lets no gradient through, so that layers before learn from terms only.
    """

    def __init__(self, index: int, *, recompute: bool = False, cut: bool = False) -> None:
        super().__init__()
        self.layer = toy_layer(index)
        self.index, self.recompute, self.cut = index, recompute, cut

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h.detach() if self.cut else h
        return checkpoint(self.work, h, use_reentrant=False) if self.recompute else self.work(h)

    def work(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layer(h)
        stretto.add_loss("balance", 0.01 * h.pow(2).mean())
        if self.index == 1:
            stretto.add_loss("first column", h[:, 0].mean().reshape(1))
        return h


def balanced(depth: int, form: str) -> list[nn.Module]:
    """Layers that all add terms."""
    return [
        Balanced(index, recompute=form == "recompute", cut=form == "cut" and index == 2)
        for index in range(depth)
    ]


def plain_balanced(depth: int, form: str, m: int, scale: float) -> tuple[Any, dict[str, float]]:
    """Gradients of (loss + terms) and the terms' means, in one process."""
    model = nn.Sequential(*balanced(depth, form))
    inputs, targets = toy_batch(10)
    terms: dict[str, float] = {}
    for x, t in zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True):
        with stretto.collect_losses() as added:
            loss = MSE(model(x), t)
        share = 10 / len(x)
        ((loss / share + sum(value / share for _, value in added)) * scale).backward()
        for name, value in added:
            terms[name] = terms.get(name, 0.0) + (value / share).item()
    return gradients_of(model), terms


def compare_terms(rank: int, group: Any, num_ranks: int) -> list[Any]:
    """Gradients and reported terms of every schedule; also returns the reported numbers."""
    wrong: list[str] = []
    reported: dict[tuple[int, int, str], set[tuple[tuple[str, float], ...]]] = {}
    forms = [(1, "plain"), (4, "plain"), (4, "recompute"), (4, "cut")]
    for m, form in forms if num_ranks == 2 else forms[::3]:
        for name, schedule in every_schedule(num_ranks, m):
            depth = 4 if schedule.num_stages <= 4 else 8
            stages = split(balanced(depth, form), schedule, rank=rank)
            engine = Engine(stages, schedule, loss_fn=MSE, group=group)
            for scale in (1.0, 1024.0):
                where = f"{name}, m={m}, {form}, {scale}: "
                expected, terms = plain_balanced(depth, form, m, scale)
                losses = engine.step(*toy_batch(10), loss_scale=scale).losses
                found = gradients_here(engine)
                wrong += [
                    where + key
                    for key, gradient in found.items()
                    if not torch.allclose(gradient, expected[key], rtol=1e-12, atol=1e-16)
                ]
                told = {key: value.item() for key, value in losses.items()}
                if told != terms:
                    wrong.append(where + f"{told} is not {terms}")
                reported.setdefault((depth, m, form), set()).add(tuple(sorted(told.items())))
                for stage in engine.stages.values():
                    stage.zero_grad()
            evaluated = engine.eval_step(*toy_batch(10), num_microbatches=m).losses
            if {key: value.item() for key, value in evaluated.items()} != terms:
                wrong.append(f"{name}, m={m}, {form}: evaluation {evaluated}")
            if gradients_here(engine):
                wrong.append(f"{name}, m={m}, {form}: an evaluation left gradients")
            engine.close()
    return [wrong, reported]


def test_terms_added_inside_the_model_enter_gradient_and_report() -> None:
    """Gradients are those of loss + terms, and the reports the same numbers, for p = 1, 2, 4."""
    seen: dict[Any, set[Any]] = {}
    for num_ranks in (1, 2, 4):
        answers = run_ranks(compare_terms, num_ranks, num_ranks, transport="sockets")
        assert flat([wrong for wrong, _ in answers]) == []
        for _, reported in answers:
            for key, told in reported.items():
                seen.setdefault(key, set()).update(told)
    assert {(4, 1, "plain"), (4, 4, "recompute"), (8, 4, "cut")} <= set(seen)
    assert [key for key, told in seen.items() if len(told) != 1] == []


class BadTerm(nn.Module):
    """Adds what is no term."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        stretto.add_loss("bad", self.value)
        return h


def add_bad_terms(rank: int, group: Any) -> list[str]:
    """What is told where the term, or the loss, is not one number."""
    told: list[str] = []
    schedule = next(every_schedule(2, 2))[1]
    for value in (torch.ones(2), 0.5):
        stages = {rank: BadTerm(value) if rank == 0 else Scaled()}
        engine = Engine(stages, schedule, loss_fn=MSE, group=group)
        try:
            engine.step(torch.ones(4, 2), torch.ones(4, 2))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    for loss_fn in (lambda output, target: output, lambda output, target: 0.5):
        stages = {rank: Scaled()}
        engine = Engine(stages, schedule, loss_fn=loss_fn, group=group)
        try:
            engine.step(torch.ones(4, 2), torch.ones(4, 2))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_losses_that_are_not_one_number_end_the_step_by_name() -> None:
    """The rank that made it names term, kind and microbatch; the other one does not hang."""
    first, last = run_ranks(add_bad_terms, 2, transport="sockets")
    assert "StageError: rank 0: 0F0" in first[0]
    assert "add_loss('bad'): the value is (2,)" in first[0]
    assert "add_loss('bad'): the value is float" in first[1]
    assert "StageError: rank 1: 1F0" in last[2]
    assert "the loss of microbatch 0 is a Tensor of shape (2, 2)" in last[2]
    assert "the loss of microbatch 0 is a float" in last[3]
    assert len(first) == len(last) == 4


def test_terms_outside_an_engine_are_harmless() -> None:
    """A module called by hand adds to whoever collects, and to nobody otherwise."""
    layer = Balanced(1)
    before = layer(toy_batch(4)[0])
    with stretto.collect_losses() as added:
        after = layer(toy_batch(4)[0])
        with stretto.collect_losses() as inner:
            layer(toy_batch(4)[0])
    assert same_bits(before, after)
    assert [name for name, _ in added] == [name for name, _ in inner] == ["balance", "first column"]
    with pytest.raises(InputError, match="must have one element"):
        stretto.add_loss("bad", torch.ones(2))
