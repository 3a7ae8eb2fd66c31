"""How a batch becomes microbatches, and what comes back for it: gradients of its own tensors.

What goes wrong elsewhere: labels without a second dimension cannot be cut; values that are cut on
another dimension, or not at all, need a model of their own; ready-made microbatches of unequal
sizes meet targets that were cut into equal ones; the batch enters the graph, so that gradients flow
into the user's tensors, or it is written over; and a batch stays in memory until the step ends.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from every_schedule import (
    every_schedule,
    flat,
    gradients_here,
    some_schedules,
    toy_depth,
    toy_engine,
    unequal,
)
from reference import gradients_of, same_bits, toy_batch, toy_layer, toy_layers
from stretto.errors import InputError
from stretto.ir import Schedule
from stretto.models import split
from stretto.runtime import Engine
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss


class Along(nn.Module):
    """Toy layers on values that hold the rows in dimension 1: (length, rows, width)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = toy_layer(index)

    def forward(self, h: torch.Tensor, mask: Any = None, table: Any = None) -> torch.Tensor:
        h = self.layer(h)
        if mask is not None:
            h = h * mask
        return h if table is None else h + table["shift"][0] * table["times"]


def long_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and a mask whose rows lie in dimension 1."""
    generator = torch.Generator().manual_seed(rows)
    shape = (3, rows, 4)
    inputs, targets = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return inputs, targets, (torch.rand((3, rows, 1), generator=generator) > 0.3).double()


def compare_along(rank: int, group: Any) -> list[str]:
    """Values cut on dimension 1, with a table that every microbatch gets whole."""
    wrong: list[str] = []
    inputs, targets, mask = long_batch(10)
    table = {"shift": (torch.full((4,), 0.25, dtype=torch.float64), None), "times": 3}
    for name, schedule in every_schedule(2, 4):
        depth = toy_depth(schedule)
        model = nn.Sequential(*map(Along, range(depth)))
        for x, t, part in zip(
            *(one.tensor_split(4, 1) for one in (inputs, targets, mask)), strict=True
        ):
            h = x
            for layer in model:
                h = layer(h, part, table)
            (MSE(h, t) / (10 / x.shape[1])).backward()
        stages = split([Along(index) for index in range(depth)], schedule, rank=rank)
        engine = Engine(stages, schedule, loss_fn=MSE, group=group)
        engine.step(
            stretto.along(1, inputs),
            stretto.along(1, targets),
            mask=stretto.along(1, mask),
            table=stretto.whole(table),
        )
        wrong += [f"{name}: {one}" for one in unequal(engine, gradients_of(model))]
        engine.close()
    return wrong


def test_values_are_cut_where_they_are_marked_to_be() -> None:
    """Rows in another dimension, and a table for all rows, give the plain run's bits."""
    assert flat(run_ranks(compare_along, 2, transport="gloo")) == []


@dataclass
class Features:
    """A batch that is a dataclass."""

    values: torch.Tensor
    scale: float


class Pair(NamedTuple):
    """A batch that is a named tuple."""

    left: torch.Tensor
    right: torch.Tensor


class AnyInput(nn.Module):
    """A first layer that takes a batch in any form, and tells how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = toy_layer(0)

    def forward(self, *args: Any, x: Any = None, note: Any = None) -> torch.Tensor:
        if x is not None:
            assert note in (None, "note")
            return self.layer(x)
        if isinstance(args[0], Features):
            return self.layer(args[0].values * args[0].scale)
        if isinstance(args[0], Pair):
            assert len(args) == 1
            return self.layer(args[0].left + args[0].right)
        if isinstance(args[0], list):
            assert len(args) == 1
            return self.layer(args[0][0])
        assert args[1:] in ((), (None,), (2.0,)), args
        return self.layer(args[0])


def forms(x: torch.Tensor) -> dict[str, Any]:
    """One batch in many forms; all mean the same to the first layer."""
    zeros = torch.zeros_like(x)
    return {
        "tensor": x,
        "tuple": (x,),
        "tuple with None": (x, None),
        "tuple with a number": (x, 2.0),
        "dict": {"x": x, "note": "note"},
        "dataclass": Features(x, 1.0),
        "named tuple": Pair(x, zeros),
        "list of tensors": list(x.split([2, 3, 2, 3])),
        "list of tuples": [(part, 2.0) for part in x.split([2, 3, 2, 3])],
        "list of lists": [[part] for part in x.split([2, 3, 2, 3])],
        "list of dicts": [{"x": part, "note": None} for part in x.split([2, 3, 2, 3])],
        "list in a tuple": (list(x.split([2, 3, 2, 3])), 2.0),
        "list in a dict": {"x": list(x.split([2, 3, 2, 3])), "note": stretto.whole("note")},
        "marks inside": {"x": stretto.along(0, x), "note": stretto.whole("note")},
        "list of notes": {"x": x, "note": ["note", None, "note", None]},
    }


def cut_as_listed(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows as a form of the batch cuts them."""
    return (
        rows.split([2, 3, 2, 3]) if "list" in name and "notes" not in name else rows.tensor_split(4)
    )


def compare_forms(rank: int, group: Any) -> list[str]:
    """All forms of inputs, with targets that are cut as the inputs were; gradients returned."""
    wrong: list[str] = []
    inputs, targets = toy_batch(10)
    for name, schedule in some_schedules(2, 4):
        depth = toy_depth(schedule)
        layers = [AnyInput(), *map(toy_layer, range(1, depth))]
        engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group)
        for form in forms(inputs):
            where = f"{name}, {form}: "
            x = inputs.clone().requires_grad_()
            model = nn.Sequential(*toy_layers(depth))
            pieces = [part.detach().requires_grad_() for part in cut_as_listed(form, inputs)]
            total: Any = None
            for piece, t in zip(pieces, cut_as_listed(form, targets), strict=True):
                scaled = MSE(model(piece), t) / (10 / len(piece))
                scaled.backward()
                total = scaled.detach() if total is None else total + scaled.detach()
            expected = {
                key.replace("0.", "0.layer.", 1) if key.startswith("0.") else key: gradient
                for key, gradient in gradients_of(model).items()
            }
            result = engine.step(forms(x)[form], targets, return_input_gradients=True)
            if not same_bits(result.loss, total):
                wrong.append(where + f"loss {result.loss} is not {total}")
            wrong += [where + one for one in unequal(engine, expected)]
            if x.grad is not None or not same_bits(x, inputs):
                wrong.append(where + "the user's tensor was touched")
            if schedule.placement.rank_of(0) == rank:
                found = torch.cat(tensors_in(result.input_gradients))
                gradient = torch.cat([piece.grad for piece in pieces])
                if not same_bits(found, gradient):
                    wrong.append(where + "gradients of the inputs")
                if type(result.input_gradients) is not type(forms(x)[form]):
                    wrong.append(where + f"gradients in a {type(result.input_gradients)}")
            elif result.input_gradients is not None:
                wrong.append(where + "input gradients on another rank")
            for stage in engine.stages.values():
                stage.zero_grad()
        engine.close()
    return wrong


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Features):
        value = (value.values,)
    if isinstance(value, dict):
        value = tuple(value.values())
    return (
        [one for part in value for one in tensors_in(part)]
        if isinstance(value, tuple | list)
        else []
    )


def test_batches_of_any_form_are_cut_alike_and_get_their_gradients() -> None:
    """Nested, listed and marked batches give the plain bits, and gradients in their own form."""
    assert flat(run_ranks(compare_forms, 2, transport="gloo")) == []


class Mixed(nn.Module):
    """A first layer with inputs of all kinds: rows, a table for all, a number, ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = toy_layer(0)

    def forward(
        self,
        x: torch.Tensor,
        side: torch.Tensor,
        table: torch.Tensor,
        one: Any,
        ids: Any,
        idle: Any,
    ) -> torch.Tensor:
        assert ids.dtype is torch.int64
        assert idle is not None
        return self.layer(x * table + side.t() * one)


def mixed_batch() -> dict[str, Any]:
    """Leaves that require gradients, in every way a leaf may be cut."""
    x, side = toy_batch(10)
    return {
        "x": x.clone().requires_grad_(),
        "side": side.t().clone().requires_grad_(),
        "table": torch.linspace(0.5, 1.5, 4, dtype=torch.float64).requires_grad_(),
        "one": torch.tensor(0.7, dtype=torch.float64).requires_grad_(),
        "ids": torch.arange(10),
        "idle": torch.ones(10, 2, dtype=torch.float64).requires_grad_(),
    }


def compare_mixed(rank: int, group: Any, wanted: bool) -> list[str]:
    """Two steps with gradients of the inputs asked for, or not, against plain autograd."""
    wrong: list[str] = []
    targets = toy_batch(10)[1]
    for name, schedule in every_schedule(2, 4):
        depth = toy_depth(schedule)
        plain = mixed_batch()
        layers = [Mixed(), *map(toy_layer, range(1, depth))]
        cuts = {key: plain[key].tensor_split(4) for key in ("x", "ids", "idle")}
        cuts["side"] = plain["side"].tensor_split(4, 1)
        for index, t in enumerate(targets.tensor_split(4)):
            given = {key: parts[index] for key, parts in cuts.items()}
            h = layers[0](**given, table=plain["table"], one=plain["one"])
            for layer in layers[1:]:
                h = layer(h)
            (MSE(h, t) / (10 / len(t))).backward()
        expected = gradients_of(nn.Sequential(*layers))
        layers = [Mixed(), *map(toy_layer, range(1, depth))]
        engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group)
        batch = mixed_batch()
        marked = {**batch, "side": stretto.along(1, batch["side"])}
        marked["table"] = stretto.whole(batch["table"])
        result = engine.step(marked, targets, return_input_gradients=wanted)
        wrong += [f"{name}: {one}" for one in unequal(engine, expected)]
        if any(one.grad is not None for one in batch.values()):
            wrong.append(f"{name}: the user's tensors got gradients")
        if wanted and schedule.placement.rank_of(0) == rank:
            wrong += [
                f"{name}: gradient of {key}"
                for key in ("x", "side", "table", "one")
                if not same_bits(result.input_gradients[key], plain[key].grad)
            ]
            if result.input_gradients["ids"] is not None:
                wrong.append(f"{name}: integers got a gradient")
            if result.input_gradients["idle"] is not None:
                wrong.append(f"{name}: an unused input got a gradient")
        engine.close()
    return wrong


@pytest.mark.parametrize("wanted", [True, False])
def test_gradients_of_inputs_come_back_on_request_and_never_reach_the_user(wanted: bool) -> None:
    """Rows, columns, a table for all rows and a number get what plain autograd gives them."""
    assert flat(run_ranks(compare_mixed, 2, wanted, transport="gloo")) == []


class InPlace(nn.Module):
    """A first layer that changes its input in place, as memory-saving models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = toy_layer(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(0.5).add_(0.1))


def compare_in_place(rank: int, group: Any) -> list[str]:
    """A batch that the first layer writes over, microbatch by microbatch."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        depth = toy_depth(schedule)
        inputs, targets = toy_batch(8)
        layers = [InPlace(), *map(toy_layer, range(1, depth))]
        model = nn.Sequential(*layers)
        for x, t in zip(inputs.clone().split(2), targets.split(2), strict=True):
            (MSE(model(x), t) / 4).backward()
        expected = gradients_of(model)
        layers = [InPlace(), *map(toy_layer, range(1, depth))]
        engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group)
        engine.step(inputs.clone(), targets)
        wrong += [f"{name}: {one}" for one in unequal(engine, expected)]
        engine.close()
    return wrong


def test_a_first_layer_may_change_its_microbatch_in_place() -> None:
    """A change of one microbatch is none of another, whose backward is still to come."""
    assert flat(run_ranks(compare_in_place, 2, transport="gloo")) == []


class Reads(nn.Module):
    """A layer that reads the step's extras: ids of the rows, a factor, and one it may lack."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = toy_layer(index)
        self.seen: list[list[int]] = []

    def forward(self, h: torch.Tensor, ids: torch.Tensor, factor: Any = 1.0) -> torch.Tensor:
        self.seen.append(ids.tolist())
        return self.layer(h) * factor + 0 * ids[:, None]


def compare_extras(rank: int, group: Any) -> list[str]:
    """Which rows' extras each layer saw, with labels without a second dimension."""
    wrong: list[str] = []
    inputs, _ = toy_batch(9)
    ids = torch.arange(9)
    labels = torch.arange(9) % 4
    entropy = nn.functional.cross_entropy
    for name, schedule in every_schedule(2, 4):
        depth = toy_depth(schedule)
        model = nn.ModuleList(map(Reads, range(depth)))
        for x, t, i in zip(*(one.tensor_split(4) for one in (inputs, labels, ids)), strict=True):
            h = x
            for layer in model:
                h = layer(h, i, 0.5)
            (entropy(h, t) / (9 / len(x))).backward()
        stages = split([Reads(index) for index in range(depth)], schedule, rank=rank)
        engine = Engine(stages, schedule, loss_fn=entropy, group=group)
        engine.step(inputs, labels, ids=ids, factor=0.5, unused=torch.ones(9))
        wrong += [f"{name}: {one}" for one in unequal(engine, gradients_of(model))]
        for stage in engine.stages.values():
            for layer in stage.children():
                if sorted(layer.seen) != [[0, 1, 2], [3, 4], [5, 6], [7, 8]]:
                    wrong.append(f"{name}: a layer saw the rows {layer.seen}")
        engine.close()
    return wrong


def test_every_layer_reads_the_extras_of_its_own_microbatch() -> None:
    """Ids and labels of shape [rows] are cut with the rows, on first, middle and last stages."""
    assert flat(run_ranks(compare_extras, 2, transport="gloo")) == []


def refuse_batches(rank: int, group: Any) -> list[str]:
    """What batches that cannot be cut are told, on the rank that has them and on the other."""
    engine = toy_engine(rank, group, next(every_schedule(2, 4))[1])
    x, t = toy_batch(8)
    eight = list(x.split(2))
    bad: list[tuple[Any, Any, str]] = [
        (eight[:3], None, "list of 3 microbatches"),
        ((eight, eight[:3]), None, "list of 3 microbatches"),
        ({"a": {"b": eight[:3]}}, None, "list of 3 microbatches"),
        (eight, list(t.split([3, 3, 1, 1])), "microbatch 0 has 2 rows, targets"),
        ((eight, list(x.split([3, 3, 1, 1]))), None, "microbatch 0 has 2 rows, inputs"),
        ((x, t[:7]), None, "8 rows, inputs[1] has 7"),
        (x, t[:7], "8 rows, targets has 7"),
        (x, [t, t], "list of 2 microbatches"),
        ([*eight[:3], x[:0]], t[:6], "microbatch 3 has no rows"),
        (stretto.along(2, x), None, "has no dimension 2"),
        (x.to_sparse(), None, "cannot be cut"),
        ((x, object()), None, "inputs[1] is a builtins.object"),
        ([(x, {1})] * 4, None, "inputs[0][1] is a builtins.set"),
    ]
    told: list[str] = []
    for inputs, targets, expected in bad:
        targets = t if targets is None else targets
        for run in (engine.step, partial(engine.eval_step, num_microbatches=4)):
            try:
                run(inputs if rank == 0 else None, targets)
                told.append(f"{expected}: nothing was raised")
            except InputError as error:
                # the rank of the last stage knows nothing of the inputs but what the first tells
                if expected not in str(error) and "was given" not in str(error):
                    told.append(f"{expected}: {error}")
            except Exception as error:
                told.append(f"{expected}: {type(error).__name__} {error}")
    if gradients_here(engine):
        told.append("gradients were left")
    told.append(f"{engine.step(x, t).loss.item():.6f}")
    engine.close()
    return told


def test_batches_that_cannot_be_cut_are_named_on_every_rank() -> None:
    """Lists of other lengths or sizes, other rows, wrong marks and kinds; then a good step."""
    assert run_ranks(refuse_batches, 2, transport="gloo") == [["0.552037"]] * 2


class Watched(np.ndarray):
    """Memory of a batch whose end can be seen."""


def watched(value: torch.Tensor, gone: list[str], what: str) -> torch.Tensor:
    """The same numbers in memory that reports when nothing uses it any more."""
    memory = value.numpy().copy().view(Watched)
    weakref.finalize(memory, gone.append, what)
    return torch.from_numpy(memory)


def watch_batch(rank: int, group: Any) -> list[str]:
    """When the memory of a drawn batch is let go, in training and evaluation."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        depth = toy_depth(schedule)
        layers: list[nn.Module] = [Reads(index) for index in range(depth)]
        engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group)
        inputs, targets = toy_batch(8)
        log: list[str] = []
        engine.register_hook(
            "after_forward", lambda event, log=log: log.append(f"{event.stage}F{event.microbatch}")
        )
        engine.register_hook(
            "after_backward", lambda event, log=log: log.append(f"{event.stage}B{event.microbatch}")
        )

        def source(log: list[str] = log, inputs: Any = inputs, targets: Any = targets) -> Any:
            ids = torch.arange(8)
            return (
                watched(inputs, log, "inputs"),
                watched(targets, log, "targets"),
                {"ids": watched(ids, log, "ids")},
            )

        for run in (engine.step, engine.eval_step):
            log.clear()
            run(source)
            wrong += [f"{name}: {one}" for one in kept_too_long(log, schedule, rank)]
        engine.close()
    return wrong


def kept_too_long(log: list[str], schedule: Schedule, rank: int) -> list[str]:
    """What of the batch outlived the last action that uses it by more than one action."""
    kind = "B" if any(one[1] == "B" for one in log) else "F"
    mine = schedule.placement.stages_of(rank)
    users = {"inputs": [0], "targets": [schedule.num_stages - 1], "ids": mine}
    late: list[str] = []
    for what, stages in users.items():
        uses = [i for i, one in enumerate(log) if one[1] == kind and one[0] in map(str, stages)]
        start = max(uses) + 1 if uses else 0
        end = log.index(what) if what in log else None
        between = [one for one in log[start:end] if one[0].isdigit()]
        if end is None or len(between) > bool(uses):
            late.append(f"{what} outlived its last use by {between}")
    return late


def test_a_drawn_batch_is_let_go_after_its_last_microbatch() -> None:
    """Inputs, targets and extras go with their last use, or at once where nobody needs them."""
    assert flat(run_ranks(watch_batch, 2, transport="gloo")) == []
