"""Stages that change what they are given, in place, as modules may in the unsplit model.

What goes wrong elsewhere: received tensors are leaves, which torch refuses to change; or the change
reaches a tensor that the stage before still needs, or its parameters, and nobody is told, since the
two stages share memory and not the graph that would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import flat
from stretto.errors import ExecutionError
from stretto.ir import Schedule
from stretto.ir.calling import WithSkips
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks
from value_models import (
    WORLDS,
    Case,
    Part,
    Pipeline,
    Work,
    all_differences,
    drawn_batch,
    notes_of,
    plain_step,
    schedules,
    unlike,
)


def linear(part: Part, h: torch.Tensor) -> torch.Tensor:
    """The linear layer, which needs its input and not its output."""
    return part.linear(h)


def then(change: Any) -> Work:
    """A stage that changes its input in place, and works on it."""

    def run(part: Part, h: torch.Tensor) -> torch.Tensor:
        changed = change(h)
        return part.linear(h if changed is None else changed)

    return run


def first_column(h: torch.Tensor) -> None:
    """A change through a view."""
    h[:, 0] = 0.5
    h[1:].mul_(2)


def through_views(h: torch.Tensor) -> torch.Tensor:
    """A change of the transposed one, seen in the tensor and in another view."""
    row = h[0]
    h.t().add_(torch.arange(h.numel()).view(5, -1) * 0.1)
    return h * row


def several(h: torch.Tensor) -> torch.Tensor:
    """One change after the other, some of them saved in between."""
    saved = h.sigmoid()
    h.add_(1).clamp_(max=0.7)
    return h.sigmoid_() * saved


def replaced(h: torch.Tensor) -> None:
    """All numbers are others afterwards, and carry another gradient."""
    h.copy_(torch.tanh(h.clone()) * 2)


CHANGES = {
    "multiplied": lambda h: h.mul_(1.7),
    "activated": nn.functional.relu_,
    "activated by a module": nn.SiLU(inplace=True),
    "dropped": lambda h: h.masked_fill_(h > 0.1, 0.3),
    "a column": first_column,
    "through views": through_views,
    "several": several,
    "replaced": replaced,
    "to zero": lambda h: h.zero_(),
    "indexed": lambda h: h.index_fill_(0, torch.tensor([0]), 0.3),
    "cut off": lambda h: h.detach_(),
    "sorted away": lambda h: h.t_().transpose_(0, 1),
    "added to itself": lambda h: h.add_(h),
}


def payload(part: Part, x: torch.Tensor) -> Any:
    """An activation, a mask, a number that is counted up, and a constant."""
    return part.linear(x), x > 0, torch.zeros((), dtype=torch.int64), x * 2


def payload_on(part: Part, h: Any, mask: Any, count: Any, constant: Any) -> Any:
    """All are changed in place and sent on."""
    h.mul_(mask.float())
    mask.logical_not_()
    count += 1
    constant.add_(count)
    return h, mask, count, constant


def payload_used(part: Part, h: Any, mask: Any, count: Any, constant: Any) -> torch.Tensor:
    """What became of them is used."""
    h, mask, count, constant = payload_on(part, h, mask, count, constant)
    return part.linear(h.add_(constant)) * mask.float().add_(count)


def returned_and_changed(part: Part, h: torch.Tensor) -> torch.Tensor:
    """The input itself, changed, is the output."""
    return h.mul_(2).add_(part.linear.bias)


def asked_for(part: Part, h: torch.Tensor, constant: torch.Tensor) -> Any:
    """A constant becomes a leaf that needs a gradient, which stays here."""
    constant.requires_grad_()
    return part.linear(h) * constant, constant.detach()


def one_of_two(part: Part, h: torch.Tensor, other: torch.Tensor) -> Any:
    """Of two activations one is changed."""
    h.mul_(other.detach().cos())
    return part.linear(h), other


def same_twice(part: Part, *values: torch.Tensor) -> Any:
    """One tensor in two places: who changes the one changes the other."""
    if len(values) == 1:
        h = part.linear(values[0])
        return h, h
    first, second = values
    first.mul_(1.5)
    h = part.linear(second)
    return h, h


def apart(one: Any, other: Any) -> Case:
    """Two views that share memory and no element, both of which are changed in place."""

    def first(part: Part, x: torch.Tensor) -> Any:
        h = part.linear(x)
        return one(h), other(h)

    def middle(part: Part, *values: torch.Tensor) -> Any:
        values[0].mul_(1.5)
        values[1].add_(0.1)
        h = part.linear(torch.cat([value.reshape(-1) for value in values]).view(-1, 5))
        return one(h), other(h)

    return Case(
        first, middle, lambda part, *values: part.linear(torch.cat(middle(part, *values), 1))
    )


CASES = {
    **{name: Case(linear, then(change), then(change)) for name, change in CHANGES.items()},
    "everything in a payload": Case(payload, payload_on, payload_used),
    "the input is the output": Case(linear, returned_and_changed, returned_and_changed),
    "the batch": Case(then(CHANGES["multiplied"]), linear, linear),
    "a constant that is asked for a gradient": Case(
        lambda part, x: (part.linear(x), x * 2), asked_for, lambda part, h, c: part.linear(h) * c
    ),
    "one of two": Case(
        lambda part, x: (part.linear(x), part.linear(x * 2)),
        one_of_two,
        lambda part, h, other: one_of_two(part, h, other)[0] * other,
    ),
    "slices of columns": apart(lambda h: h[:, :2], lambda h: h[:, 2:]),
    "every second column": apart(lambda h: h[:, ::2], lambda h: h[:, 1::2]),
    "one tensor twice": Case(same_twice, same_twice, lambda part, h, g: same_twice(part, h, g)[0]),
}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_stages_may_change_their_inputs_in_place(num_ranks: int, transport: str) -> None:
    """Values, losses and gradients are those of the plain run, which may do so, too."""
    assert all_differences(num_ranks, transport, CASES) == []


def beside(view: Any) -> Case:
    """An activation and a view of it, the first of which the next stages change."""

    def first(part: Part, x: torch.Tensor) -> Any:
        h = part.linear(x)
        return h, view(h)

    def middle(part: Part, h: torch.Tensor, other: torch.Tensor) -> Any:
        h.mul_(2)
        return part.linear(h), other

    return Case(first, middle, lambda part, h, other: middle(part, h, other)[0] + other.sum())


def weight_passed(part: Part, x: torch.Tensor) -> Any:
    """A parameter beside an activation."""
    return part.linear(x), part.linear.weight


def bias_passed(part: Part, x: torch.Tensor) -> Any:
    """A view of a parameter beside an activation."""
    return part.linear(x), part.linear.bias[1:]


def weight_changed(part: Part, h: torch.Tensor, weight: torch.Tensor) -> Any:
    """The parameter of another stage is changed in place."""
    weight.mul_(2)
    return part.linear(h) + weight.sum(), weight


SHARED = "was changed in place; it shares memory with "


def buffer_passed(part: Part, x: torch.Tensor) -> Any:
    """A buffer of this stage beside an activation."""
    if not hasattr(part, "table"):
        part.register_buffer("table", torch.ones(3))
    return part.linear(x), part.get_buffer("table")


def passed_on(part: Part, h: torch.Tensor, other: torch.Tensor) -> Any:
    """What came beside the activation goes on."""
    return part.linear(h), other


def other_changed(part: Part, h: torch.Tensor, other: torch.Tensor) -> Any:
    """What came beside the activation is changed in place."""
    other.mul_(2)
    return part.linear(h) + other.sum(), other


REFUSED = {
    "a buffer": Case(buffer_passed, other_changed, lambda p, h, b: other_changed(p, h, b)[0]),
    "the batch itself": Case(
        lambda part, x: (part.linear(x), x),
        other_changed,
        lambda p, h, b: other_changed(p, h, b)[0],
    ),
    "a view beside it": beside(lambda h: h.view(-1)),
    "a part beside it": beside(lambda h: h[:, 1:2]),
    "windows beside it": beside(lambda h: h.unfold(1, 2, 1)),
    "its bytes beside it": beside(lambda h: h.detach().view(torch.uint8)),
    "a constant and its view": Case(
        lambda part, x: (part.linear(x), x[:, :3], x[:, 2:]),
        lambda part, h, left, right: (part.linear(h), left.mul_(2), right),
        lambda part, h, left, right: part.linear(h) * left.mul_(2).sum() + right.sum(),
    ),
    "a parameter": Case(weight_passed, weight_changed, lambda p, h, w: weight_changed(p, h, w)[0]),
    "a part of a parameter": Case(
        bias_passed, weight_changed, lambda p, h, b: weight_changed(p, h, b)[0]
    ),
}


def told_of(
    rank: int, group: Any, schedule: Schedule, case: Case
) -> tuple[Mapping[int, Part], str]:
    """The stages of this rank after a step, and what it raised."""
    pipeline = Pipeline(rank, group, schedule)
    pipeline.begin(case)
    try:
        pipeline.step(0)
    except ExecutionError as error:
        return pipeline.mine, str(error)
    finally:
        pipeline.engine.close()
    return pipeline.mine, "nothing"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_changes_that_reach_other_values_are_refused_by_name(num_ranks: int, name: str) -> None:
    """In the unsplit model they would change both, here only one: the stage is told so."""
    for label, schedule in schedules(num_ranks, 4):
        told = [text for _, text in run_ranks(told_of, num_ranks, schedule, REFUSED[name])]
        assert any(SHARED in one and "1F0 (stage 1, microbatch 0)" in one for one in told), label


def needed(part: Part, h: torch.Tensor) -> torch.Tensor:
    """An activation that its own backward needs."""
    return torch.tanh(part.linear(h))


NEEDED = Case(needed, then(CHANGES["multiplied"]), linear)


def changed_though_needed(rank: int, group: Any, num_ranks: int) -> list[str]:
    """A change of what the stage before needs: an error where they share memory, else right."""
    wrong: list[str] = []
    apart = Case(needed, lambda part, h: part.linear(h * 1.7), linear)
    for label, schedule in schedules(num_ranks, 4):
        plain = [Part(index) for index in range(schedule.num_stages)]
        plain_step(apart, apart.given_to(plain), 0, 4)
        mine, told = told_of(rank, group, schedule, NEEDED)
        if num_ranks == 1 and schedule.num_stages > 2:
            if "0B0 (stage 0, microbatch 0)" not in told or "inplace operation" not in told:
                wrong.append(f"{label}: {told}")
        elif told != "nothing":
            wrong.append(f"{label}: {told}")
        else:
            for index, part in mine.items():
                wrong += [
                    f"{label}, stage {index}: {one}" for one in unlike(part, notes_of(plain[index]))
                ]
    return wrong


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_a_change_of_what_the_stage_before_needs(num_ranks: int, transport: str) -> None:
    """Torch says so where both are on one rank, as in the unsplit model; a sent copy may change."""
    answers = run_ranks(changed_though_needed, num_ranks, num_ranks, transport=transport)
    assert flat(answers) == []


class Skipping(nn.Module):
    """A stage that makes a skip value of its output, changes its input in place, or uses the skip.

    Args:
        makes: Whether its output is also the value `s` for later stages.
        uses: Whether it gets `s`.
        changes: What it changes in place: its input, `s`, or nothing.
    """

    def __init__(self, *, makes: bool = False, uses: bool = False, changes: str = "") -> None:
        super().__init__()
        self.skip_outputs = ("s",) if makes else ()
        self.skip_inputs = ("s",) if uses else ()
        self.linear = nn.Linear(5, 5)
        self.changes = changes

    def forward(self, h: torch.Tensor, s: torch.Tensor | None = None) -> Any:
        if self.changes:
            {"input": h, "s": s}[self.changes].mul_(2)
        h = self.linear(h) if s is None else self.linear(h) * s
        return WithSkips(h, {"s": h}) if self.skip_outputs else h


SKIPPING = {
    "the output is changed": [
        Skipping(makes=True),
        Skipping(changes="input"),
        Skipping(uses=True),
    ],
    "another user's is changed": [
        Skipping(makes=True),
        Skipping(uses=True, changes="s"),
        Skipping(uses=True),
    ],
    "nothing is changed": [Skipping(makes=True), Skipping(uses=True), Skipping(uses=True)],
}


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize("placement", ["apart", "together"])
def test_changes_that_reach_skip_values_are_refused_by_name(placement: str, name: str) -> None:
    """A skip value that is also an output, or has two users, may not be changed in place."""
    num_ranks = 3 if placement == "apart" else 1
    schedule = build(
        "looped_bfs", num_ranks=num_ranks, num_microbatches=2, stages_per_rank=3 // num_ranks
    )

    def told(rank: int, group: Any) -> str:
        mine = {index: SKIPPING[name][index] for index in schedule.placement.stages_of(rank)}
        engine = Engine(mine, schedule, loss_fn=nn.functional.mse_loss, group=group)
        try:
            engine.step(*drawn_batch(0, 4))
        except ExecutionError as error:
            return str(error)
        return "nothing"

    answers = run_ranks(told, num_ranks)
    if name == "nothing is changed":
        assert answers == ["nothing"] * num_ranks
    else:
        assert any(SHARED in one and "1F0" in one for one in answers)
