"""Gradients for some of the values between stages, or for some of the microbatches.

What goes wrong elsewhere: a table of constants between two activations makes the backward fail, or
the gradients that come back are paired with the wrong tensors, since need of a gradient is a fact
of the first message, of the dtype, or of the place. And where a tensor is used on a condition, one
side waits for a gradient that the other never made, or zeros are made up that leave their mark in
an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # which a recomputation imports: once here, and not in every rank
from torch.utils.checkpoint import checkpoint

from every_schedule import flat
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks
from value_models import WORLDS, Case, Part, Pipeline, Work, all_differences, drawn_batch, schedules


def mixed(part: Part, x: torch.Tensor) -> Any:
    """A constant, an activation, a detached one, and another activation."""
    h = part.linear(x)
    return torch.full((3,), 0.7), h, h.detach() * 2, torch.sin(h)


def mixed_on(part: Part, const: Any, h: Any, still: Any, h2: Any) -> Any:
    """One activation is changed, everything else is passed straight through."""
    return const, part.linear(h) * const.sum(), still, h2


def mixed_used(part: Part, const: Any, h: Any, still: Any, h2: Any) -> torch.Tensor:
    """All four are used."""
    return part.linear(h) * const.mean() + still * h2


def reordered(work: Work, order: Sequence[int], *, is_first: bool, is_last: bool) -> Work:
    """The same work with the four values in another order between the stages."""

    def run(part: Part, *args: Any) -> Any:
        given = args if is_first else [args[order.index(place)] for place in range(4)]
        made = work(part, *given)
        return made if is_last else tuple(made[place] for place in order)

    return run


def in_order(order: Sequence[int]) -> Case:
    """The mixed values in some order."""
    return Case(
        reordered(mixed, order, is_first=True, is_last=False),
        reordered(mixed_on, order, is_first=False, is_last=False),
        reordered(mixed_used, order, is_first=False, is_last=True),
    )


def recomputed(work: Work, *, use_reentrant: bool = False) -> Work:
    """The same work, done again in the backward."""

    def run(part: Part, *args: Any) -> Any:
        microbatch = part.calls

        def work_again(*given: Any) -> Any:
            calls, part.calls = part.calls, microbatch
            try:
                return work(part, *given)
            finally:
                part.calls = calls

        return checkpoint(work_again, *args, use_reentrant=use_reentrant)

    return run


again = partial(recomputed, use_reentrant=True)


def pair(part: Part, x: torch.Tensor) -> Any:
    """Two activations."""
    h = part.linear(x)
    return h, torch.tanh(h)


def pair_on(part: Part, h: Any, k: Any) -> Any:
    """One is changed, the other passed straight through."""
    return part.linear(h), k


def used_when(condition: Callable[[int], bool]) -> Work:
    """A last stage that uses its second value in some microbatches only."""

    def run(part: Part, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return part.linear(h) * k if condition(part.calls % 4) else part.linear(h)

    return run


def neither_used_when(condition: Callable[[int], bool]) -> Work:
    """A last stage that uses nothing it is given in some microbatches."""

    def run(part: Part, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        h, k = (h.detach(), k.detach()) if condition(part.calls % 4) else (h, k)
        return part.linear(h) * k

    return run


def now_and_then(part: Part, h: torch.Tensor, k: torch.Tensor) -> Any:
    """Need of a gradient that changes from microbatch to microbatch, and moves."""
    if part.calls % 3 == 0:
        return part.linear(h.detach()), k.detach()
    if part.calls % 3 == 1:
        return h.detach(), k
    return part.linear(h), k


class OneWay(torch.autograd.Function):
    """Two outputs of one node, the second without a gradient of its input; None stays None."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, k: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return h * 2, k * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_h, of_k = gradients
        if of_k is not None:
            of_h = 5 * of_k if of_h is None else of_h + 5 * of_k
        return of_h, None


def one_way(part: Part, h: torch.Tensor, k: torch.Tensor) -> Any:
    """A function of the user's that keeps back a gradient."""
    return OneWay.apply(part.linear(h), k)


def penalised(part: Part, h: torch.Tensor, k: torch.Tensor) -> Any:
    """A gradient with respect to the stage's input is a part of its output."""
    h = h if h.requires_grad else h.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.sin(part.linear(h)).sum(), h, create_graph=True)
    return part.linear(h) + slope, k


def frozen(part: Part, *args: Any) -> Any:
    """A stage whose parameters need no gradient."""
    part.requires_grad_(False)
    return pair(part, *args) if len(args) == 1 else pair_on(part, *args)


def made_here(part: Part, x: torch.Tensor) -> Any:
    """A leaf that is made in the forward, and what is made of it."""
    leaf = (x * 2).requires_grad_()
    return leaf, leaf * 3


def sometimes_nothing(part: Part, h: torch.Tensor, k: torch.Tensor) -> Any:
    """No gradient goes back from here in odd microbatches."""
    if part.calls % 2:
        return part.linear(h.detach()), torch.cos(k.detach())
    return part.linear(h), torch.cos(k)


always = used_when(lambda m: True)
CASES = {
    **{f"order {order}": in_order(order) for order in ((0, 1, 2, 3), (1, 3, 0, 2), (3, 0, 2, 1))},
    "recomputed": Case(recomputed(mixed), recomputed(mixed_on), recomputed(mixed_used)),
    "recomputed the old way": Case(mixed, again(mixed_on), again(mixed_used), evaluates=False),
    "recomputed in part": Case(mixed, recomputed(mixed_on), mixed_used),
    "in odd ones": Case(pair, pair_on, used_when(lambda m: m % 2 == 1), steps=3),
    "not in the first": Case(pair, pair_on, used_when(lambda m: m != 0)),
    "in the first only": Case(pair, pair_on, used_when(lambda m: m == 0)),
    "in the last only": Case(pair, pair_on, used_when(lambda m: m == 3)),
    "never": Case(pair, pair_on, used_when(lambda m: False)),
    "nothing in odd ones": Case(pair, pair_on, neither_used_when(lambda m: m % 2 == 1)),
    "nothing but in the second": Case(pair, pair_on, neither_used_when(lambda m: m != 1)),
    "nothing ever": Case(pair, pair_on, neither_used_when(lambda m: True)),
    "in odd ones, recomputed": Case(
        pair, recomputed(pair_on), recomputed(used_when(lambda m: m % 2 == 1))
    ),
    "need moves": Case(pair, now_and_then, always),
    "a stage cuts off odd ones": Case(pair, sometimes_nothing, always),
    "a function keeps one back": Case(pair, one_way, always),
    "a function keeps one back, unused": Case(pair, one_way, used_when(lambda m: m % 2 == 1)),
    "a gradient inside": Case(pair, penalised, always, evaluates=False),
    "frozen first": Case(frozen, pair_on, always),
    "frozen middle": Case(pair, frozen, always),
    "all but the last frozen": Case(frozen, frozen, always),
    "leaves of the forward": Case(made_here, pair_on, always, evaluates=False),
}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_gradients_equal_where_only_some_values_need_or_get_them(
    num_ranks: int, transport: str
) -> None:
    """Losses, gradients (none where the plain run has none) and need of gradients are equal."""
    assert all_differences(num_ranks, transport, CASES) == []


def gradients_told(rank: int, group: Any) -> list[list[bool]]:
    """For each backward of the first stage, which of its four outputs got a gradient."""
    pipeline = Pipeline(rank, group, one_f_one_b(num_ranks=3, num_microbatches=4))
    told: list[list[bool]] = []
    if rank == 0:
        pipeline.engine.register_hook(
            "before_backward", lambda event: told.append([g is not None for g in event.value])
        )
    pipeline.begin(CASES["order (0, 1, 2, 3)"])
    pipeline.step(0)
    pipeline.engine.close()
    return told


def test_only_values_that_need_a_gradient_get_one() -> None:
    """Of (constant, h, detached, h2) gradients come back for h and h2, in their places."""
    answers = run_ranks(gradients_told, 3, transport="sockets")
    assert answers[0] == [[False, True, False, True]] * 4


def layouts_sent(rank: int, group: Any) -> list[str]:
    """Counts of layouts of three steps in which the same values stay without gradients."""
    wrong: list[str] = []
    for label, schedule in schedules(2, 4):
        pipeline = Pipeline(rank, group, schedule)
        pipeline.begin(replace(CASES["never"], batches=lambda step: drawn_batch(step, 8)))
        counts = []
        for step in range(3):
            pipeline.step(step)
            counts.append(pipeline.engine.metadata_count)
        pipeline.engine.close()
        if len(set(counts)) != 1:
            wrong.append(f"{label}: {counts} layouts after each step")
    return wrong


def test_absent_gradients_cost_no_layouts_while_they_stay_absent() -> None:
    """A message without a tensor is a message like another: told once."""
    assert flat(run_ranks(layouts_sent, 2, transport="sockets")) == []
