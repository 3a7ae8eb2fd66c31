"""Lengths, numbers of rows and of tensors that change between steps and within one.

What goes wrong elsewhere: buffers made for the first step's shapes cut longer sequences, fill
shorter ones with what was there before, or kill the receiving process; gradients do not fit; users
pad every batch to one length, which costs what they wanted to save. Or shapes travel with every
message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from every_schedule import flat
from stretto.errors import ExecutionError
from stretto.ir import Schedule
from stretto.testing import run_ranks
from value_models import WORLDS, Case, Part, Pipeline, all_differences, drawn_batch, schedules

LENGTHS = (4, 6, 6, 3)
WITHIN = (5, 7)
"""Lengths of the two microbatches of one step."""


def tokens(part: Part, h: torch.Tensor) -> torch.Tensor:
    """The same work on every token."""
    return torch.tanh(part.linear(h))


def of_lengths(step: int) -> Any:
    """Four steps of one length each, then one with a length for each microbatch."""
    if step < len(LENGTHS):
        return drawn_batch(step, 4, LENGTHS[step])
    made = [drawn_batch(step + length, 2, length) for length in WITHIN]
    return [x for x, _ in made], [target for _, target in made]


def longer_and_shorter(step: int) -> Any:
    """Rows and lengths both change, in lists of microbatches of unequal sizes."""
    sizes = [((3, 2), (1, 9)), ((1, 1), (4, 3)), ((2, 30), (2, 1))][step]
    made = [drawn_batch(rows + length, rows, length) for rows, length in sizes]
    return [x for x, _ in made], [target for _, target in made]


def apart(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of outputs whose rows have nothing to do with the targets'."""
    return lambda output, target: (loss(output) - target.mean()).square()


def chosen(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Only rows of which a number is positive; in some microbatches none."""
    h = part.linear(x)
    return h[x[:, 0] > [0.0, 9.0, -0.5, 0.5][part.calls % 4]]


def chosen_on(part: Part, h: torch.Tensor) -> torch.Tensor:
    """Twice the rows, or half of them."""
    h = part.linear(h)
    return torch.cat([h, h * 2]) if part.calls % 2 == 0 else h[::2]


def chosen_used(part: Part, h: torch.Tensor) -> torch.Tensor:
    """Work on as many rows as there are."""
    return part.linear(h) if len(h) else part.linear(h.new_zeros(1, 5)) + h.sum()


def dealt(part: Part, x: torch.Tensor) -> Any:
    """As many tensors as the microbatch's number says, of growing sizes."""
    h = part.linear(x)
    return [h * (i + 1) for i in range(part.calls % 4)] + [h.repeat(part.calls % 3 + 1, 1)]


def dealt_on(part: Part, many: list[torch.Tensor]) -> Any:
    """One less or one more than came, in the other order."""
    made = [part.linear(one) for one in reversed(many)]
    return made[1:] if part.calls % 3 == 2 and len(made) > 1 else [*made, many[0]]


def dealt_used(part: Part, many: list[torch.Tensor]) -> torch.Tensor:
    """All of them."""
    return part.linear(torch.cat(many))


def folded_up(part: Part, x: torch.Tensor) -> torch.Tensor:
    """One to four dimensions, by turns, for the same numbers."""
    h = part.linear(x)
    return [h, h.reshape(-1), h.unsqueeze(0), h.reshape(1, -1, 1, 5)][part.calls % 4]


def unfolded(part: Part, h: torch.Tensor) -> torch.Tensor:
    """Two dimensions, whatever came."""
    return part.linear(h.reshape(-1, 5))


TOKENS = {
    "lengths": Case(tokens, tokens, tokens, batches=of_lengths, steps=5),
    "rows and lengths": Case(
        tokens, tokens, tokens, batches=longer_and_shorter, steps=3, evaluates=False
    ),
}
"""With two microbatches."""

CHANGING = {
    "rows that data choose": Case(chosen, chosen_on, chosen_used, loss=apart(torch.sum)),
    "numbers of tensors": Case(dealt, dealt_on, dealt_used, loss=apart(torch.mean)),
    "numbers of dimensions": Case(folded_up, unfolded, unfolded),
    "numbers of dimensions, folded again": Case(
        folded_up, lambda p, h: folded_up(p, h.reshape(-1, 5)), unfolded
    ),
}
"""With four microbatches, each of another shape."""


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_lengths_may_change_between_steps_and_within_one(num_ranks: int, transport: str) -> None:
    """Steps of length 4, 6, 6, 3, then 5 and 7 in one, equal the plain run in every bit."""
    assert all_differences(num_ranks, transport, TOKENS, num_microbatches=2) == []


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_shapes_may_change_in_every_microbatch(num_ranks: int, transport: str) -> None:
    """Rows that data choose, none included, and other numbers of tensors and dimensions."""
    assert all_differences(num_ranks, transport, CHANGING) == []


def outgoing_edges(schedule: Schedule, rank: int) -> int:
    """How many edges to other ranks start on a rank, forward and backward."""
    owners = schedule.placement.replicas[0]
    steps = [one for one in pairwise(owners) if one[0] != one[1]]
    return sum(one.count(rank) for one in steps)


def layouts_told(rank: int, group: Any, num_ranks: int) -> list[str]:
    """How many layouts each step tells where its lengths are those of before, or others."""
    wrong: list[str] = []
    for label, schedule in schedules(num_ranks, 2):
        pipeline = Pipeline(rank, group, schedule)
        pipeline.begin(TOKENS["lengths"])
        edges = outgoing_edges(schedule, rank)
        told, before = [], 0
        for step in (0, 1, 2, 3, 3, 4, 4):
            pipeline.step(step)
            told.append((pipeline.engine.metadata_count - before) / edges)
            before = pipeline.engine.metadata_count
        pipeline.engine.close()
        if told != [1, 1, 0, 1, 0, 2, 2]:
            wrong.append(f"{label}: {told} layouts per edge")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_layout_is_told_once_per_edge_and_change(num_ranks: int) -> None:
    """Lengths 4, 6, 6, 3, 3 tell 1, 1, 0, 1, 0 per edge; 5 and 7 in one step tell both."""
    assert flat(run_ranks(layouts_told, num_ranks, num_ranks, transport="sockets")) == []


def refused(rank: int, group: Any, num_ranks: int) -> list[tuple[str, float]]:
    """What a new length leads to where fixed layouts were asked for, and after how long."""
    told = []
    for _, schedule in schedules(num_ranks, 2):
        pipeline = Pipeline(rank, group, schedule, fixed_layouts=True)
        pipeline.begin(TOKENS["lengths"])
        pipeline.step(0)
        pipeline.engine.eval_step(*of_lengths(1))
        pipeline.step(0)
        began = time.monotonic()
        try:
            pipeline.step(1)
        except ExecutionError as error:
            told.append((str(error), time.monotonic() - began))
        pipeline.engine.close()
    return told


def test_a_new_length_is_refused_where_layouts_are_fixed() -> None:
    """The rank that sees it names both, nothing is sent, and no rank waits; evaluation may."""
    first, *others = run_ranks(refused, 3, 3, transport="sockets")
    for text, _ in first:
        assert "0SEND_F0: stage 0, microbatch 0: fixed layouts were asked for" in text
        assert "(float32[2, 6, 5]) in tensor was to be sent where (float32[2, 4, 5])" in text
    for told in (first, *others):
        assert len(told) == 4
        assert all(seconds < 10 for _, seconds in told)
