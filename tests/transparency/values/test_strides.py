"""Tensors, and gradients, that do not lie in memory in the order of their elements.

What goes wrong elsewhere: a transposed output is sent in the order of its memory and arrives
scrambled, or is refused on some backends; or it arrives contiguous, and kernels that look at
strides give other bits than in the unsplit model. Expanded tensors are blown up on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from every_schedule import flat
from stretto.testing import run_ranks
from value_models import WORLDS, Case, Part, Pipeline, Work, all_differences, schedules

Form = Callable[[torch.Tensor], torch.Tensor]

FORMS: dict[str, tuple[Form, Form]] = {
    "transposed": (lambda h: h.t(), lambda t: t.t()),
    "permuted": (
        lambda h: h.view(-1, 5, 1, 1).permute(2, 1, 3, 0),
        lambda t: t.permute(3, 1, 0, 2).flatten(1),
    ),
    "channels last": (
        lambda h: (
            h.reshape(-1, 5, 1, 1).expand(-1, 5, 2, 3).contiguous(memory_format=torch.channels_last)
        ),
        lambda t: t.sum((2, 3)),
    ),
    "a slice of columns": (lambda h: h[:, 1:4], lambda t: torch.cat([t, t[:, :2]], 1)),
    "every second column": (lambda h: h.repeat(1, 2)[:, ::2], lambda t: t * 2),
    "every second row": (lambda h: h.repeat_interleave(2, 0)[::2], lambda t: t),
    "one row for all": (lambda h: h[:1].expand(3, 5), lambda t: t.sum(0, keepdim=True)),
    "one column for all": (lambda h: h[:, 2:3].expand(-1, 5), lambda t: t),
    "one number for all": (lambda h: h.mean().expand(4, 5), lambda t: t[1:3]),
    "expanded in the middle": (lambda h: h[:, None].expand(-1, 3, 5), lambda t: t.sum(1)),
    "windows": (lambda h: h.unfold(1, 3, 1), lambda t: torch.cat([t[..., 0], t[:, :2, 2]], 1)),
    "a diagonal": (lambda h: torch.diag_embed(h).diagonal(0, 1, 2), lambda t: t.reshape(-1, 5)),
    "an offset": (lambda h: h.reshape(-1).repeat(2)[3:], lambda t: t[:5].reshape(1, 5)),
    "strides of its own": (lambda h: h.repeat(3, 3).as_strided((2, 5), (7, 2), 4), lambda t: t * 1),
    "rows of length one": (lambda h: h.reshape(-1, 1), lambda t: t.reshape(-1, 5)),
    "one of several parts": (
        lambda h: h.split([1, 3, 1], 1)[1],
        lambda t: (t.mean(1, True) + t[:, :1]).expand(-1, 5),
    ),
    "unbound": (lambda h: h.repeat(1, 2).view(-1, 2, 5).unbind(1)[1], lambda t: t),
}


def sent_as(form: Form) -> Work:
    """A first stage that sends an activation in some form."""
    return lambda part, x: part.noted(form(part.noted(part.linear(x))))


def sent_on(back: Form, form: Form) -> Work:
    """A stage that works on it and sends it in this form again."""

    def run(part: Part, t: torch.Tensor) -> torch.Tensor:
        return part.noted(form(part.linear(back(t))))

    return run


def used(back: Form) -> Work:
    """The last stage."""
    return lambda part, t: part.linear(back(t))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the same everywhere, that is, expanded, and depends on a target."""
    return output.sin().sum() * target.mean()


CASES = {
    name: Case(sent_as(form), sent_on(back, form), used(back), loss=loss)
    for name, (form, back) in FORMS.items()
}


class Turned(torch.autograd.Function):
    """The identity, whose gradients come in another order in memory."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, turn: Form) -> torch.Tensor:
        ctx.turn = turn
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.turn(gradients[0]), None


def with_gaps(gradient: torch.Tensor) -> torch.Tensor:
    """The same numbers with others between them."""
    return torch.stack([gradient, gradient + 1], 2)[..., 0]


TURNS: dict[str, Form] = {
    "transposed": lambda gradient: gradient.t().contiguous().t(),
    "expanded": lambda gradient: gradient.mean().expand_as(gradient),
    "one row for all": lambda gradient: gradient[:1].expand_as(gradient),
    "with gaps": with_gaps,
    "at an odd place": lambda gradient: torch.cat([gradient.reshape(-1)[:1], gradient.reshape(-1)])[
        1:
    ].view_as(gradient),
    "windows": lambda gradient: gradient.reshape(-1).repeat(2).as_strided(gradient.shape, (1, 1)),
}


def noted(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Work whose gradient is noted."""
    return part.noted(part.linear(x))


def turned(turn: Form) -> Case:
    """Stages whose gradients go back in some form."""

    def middle(part: Part, h: torch.Tensor) -> torch.Tensor:
        return noted(part, Turned.apply(h, turn))

    return Case(noted, middle, middle)


GRADIENTS = {name: turned(turn) for name, turn in TURNS.items()}
GRADIENTS |= {
    "of a product with a transposed one": Case(
        noted,
        lambda part, h: part.noted(part.linear.weight @ h.t()).t(),
        lambda part, h: (part.linear.weight @ h.t()).t(),
    ),
    "of a sum": Case(
        noted, noted, lambda part, h: h.sum() * part.linear.bias.expand(2, 5), loss=loss
    ),
    "of what is added to a parameter": Case(
        lambda part, x: part.linear(x)[:1].expand(5, 5),
        lambda part, h: part.noted(h + part.linear.weight),
        lambda part, h: h + part.linear.weight,
        loss=loss,
    ),
}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_values_keep_their_strides(num_ranks: int, transport: str) -> None:
    """Values, strides, losses and gradients are the plain run's, in every form of a tensor."""
    assert all_differences(num_ranks, transport, CASES) == []


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_gradients_keep_their_strides(num_ranks: int, transport: str) -> None:
    """Gradients arrive as they were made: transposed, expanded, with gaps, at odd addresses."""
    assert all_differences(num_ranks, transport, GRADIENTS) == []


def six_turned(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Six numbers in two rows, transposed, times a parameter that is one."""
    part.linear.bias.data.fill_(1)
    return torch.arange(6.0).reshape(2, 3).t() * part.linear.bias[0]


def looked_at(part: Part, t: torch.Tensor) -> torch.Tensor:
    """Notes what came, and sends it on as it is."""
    part.held.setdefault("got", []).append(t.tolist())
    return t


def numbers_seen(rank: int, group: Any, num_ranks: int) -> list[str]:
    """What stages are given of six numbers sent as the transposed of a matrix."""
    wrong: list[str] = []
    for label, schedule in schedules(num_ranks, 4):
        pipeline = Pipeline(rank, group, schedule)
        pipeline.begin(
            Case(six_turned, looked_at, lambda part, t: looked_at(part, t).sum(), loss=loss)
        )
        pipeline.step(0)
        pipeline.engine.close()
        for index, part in pipeline.mine.items():
            if index > 0 and part.held["got"] != [[[0, 3], [1, 4], [2, 5]]] * 4:
                wrong.append(f"{label}, stage {index}: {part.held['got']}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_transposed_matrix_arrives_as_it_was_sent(num_ranks: int) -> None:
    """Every stage sees [[0, 3], [1, 4], [2, 5]]."""
    assert flat(run_ranks(numbers_seen, num_ranks, num_ranks, transport="sockets")) == []
