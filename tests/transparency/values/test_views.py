"""Outputs that are views: of other tensors, of parameters and buffers, of each other, of the input.

What goes wrong elsewhere: an output is freed by emptying its storage, or cut off its graph in
place, which spoils or refuses whatever shares that storage: the base a user still holds, the other
parts of a split, what a hook wrapped, the input that is passed straight through.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # which a recomputation imports: once here, and not in every rank
from torch import nn
from torch.utils.checkpoint import checkpoint

from value_models import WORLDS, Case, Part, Work, all_differences, described


def viewed(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A view of an activation that the user keeps."""
    return part.keep(part.linear(x)).view(-1)


def viewed_on(part: Part, flat: torch.Tensor) -> torch.Tensor:
    """A part of a split of a kept tensor."""
    return part.keep(part.linear(flat.view(-1, 5)).repeat(1, 2)).split(5, 1)[1].reshape(-1)


def viewed_used(part: Part, flat: torch.Tensor) -> torch.Tensor:
    """A slice of the result."""
    return part.keep(part.linear(flat.view(-1, 5)).repeat(2, 2))[: len(flat) // 5, 5:]


def straight(part: Part, *values: Any) -> Any:
    """A stage that returns what it is given."""
    return values if len(values) > 1 else values[0]


def linear(part: Part, h: torch.Tensor) -> torch.Tensor:
    """The linear layer."""
    return part.linear(h)


def twice(part: Part, *values: torch.Tensor) -> Any:
    """One tensor in two places, of which both were used in the stage before."""
    h = part.linear(values[0])
    if len(values) > 1:
        h = h.sin() * values[1] + values[0].cos() * h + values[1]
    return h, h


def twice_used(part: Part, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Uses of both, by turns: the order in which gradients are added up is that of the uses."""
    h = first.sin() * 0.3
    h = h + second.cos() * 0.7
    h = h + first.tanh() * 1.1
    return part.linear(h + second.sigmoid() * 1.3)


def sharing(part: Part, x: torch.Tensor) -> Any:
    """An activation and four views of it."""
    h = part.linear(x)
    return h, h.view(-1), h[:, :2], h.t(), h[0]


def sharing_on(part: Part, h: Any, flat: Any, columns: Any, turned: Any, row: Any) -> Any:
    """A new activation, its views, and an old one."""
    new = part.linear(h + flat.view_as(h) * turned.t() + row)
    return new, new.view(-1), columns, new.t(), new[0]


def sharing_used(part: Part, h: Any, flat: Any, columns: Any, turned: Any, row: Any) -> Any:
    """All of them."""
    return part.linear(h * flat.view_as(h) + turned.t().sin() + row) + columns.sum()


def weights(part: Part, x: torch.Tensor) -> Any:
    """A parameter, views of it, and an activation that it made."""
    weight = part.linear.weight
    return part.linear(x), weight, weight.t(), weight[1:, :3], part.linear.bias


def weights_on(part: Part, h: Any, weight: Any, turned: Any, corner: Any, bias: Any) -> Any:
    """The first stage's parameters in use, together with this one's, and a new one in its place."""
    h = nn.functional.linear(h, weight, bias) @ turned + corner.mean()
    return part.linear(h), weight, turned, part.linear.weight[1:, :3], bias


def weights_used(part: Part, h: Any, weight: Any, turned: Any, corner: Any, bias: Any) -> Any:
    """All of them."""
    return part.linear(h @ turned + bias) + corner.sum() * (weight * turned.t()).mean()


def tables(part: Part, x: torch.Tensor) -> Any:
    """A buffer, parts of it, and the input itself."""
    if not hasattr(part, "table"):
        part.register_buffer("table", torch.arange(30.0).view(6, 5))
    return x, part.keep(part.table), part.table[1:3], part.table[:, 2], x[:, 1:]


def tables_on(part: Part, x: Any, table: Any, rows: Any, column: Any, narrow: Any) -> Any:
    """The table is used and sent on."""
    return part.linear(x + rows.sum(0)), part.keep(table), rows, table[:, 3], narrow


def tables_used(part: Part, x: Any, table: Any, rows: Any, column: Any, narrow: Any) -> Any:
    """All of them."""
    return part.linear(x + table[0]) * column.sum() + narrow.sum() * rows.mean()


def many_parts(part: Part, *values: torch.Tensor) -> Any:
    """All parts of a split and of an unbound tensor: views of nodes with several outputs."""
    h = sum(value.sum(-1, keepdim=True) for value in values) if len(values) > 1 else values[0]
    h = part.linear(h.reshape(len(h), -1).expand(-1, 5))
    return (*h.split([2, 3], 1), *h.unsqueeze(1).repeat(1, 2, 1).unbind(1), *h.chunk(5, 1)[1:3])


def in_graph_mode(work: Work) -> Work:
    """The same work, recomputed in the backward."""
    return lambda part, *args: checkpoint(partial(work, part), *args, use_reentrant=False)


def hooked(part: Part) -> None:
    """Hooks of a stage and of its layer, which wrap inputs and outputs, and change gradients."""

    def note(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        part.came.append(described([inputs, outputs]))
        return tuple(None if one is None else one * 1.5 for one in inputs)

    def before(module: nn.Module, outputs: Any) -> Any:
        part.came.append(described(outputs))
        return tuple(None if one is None else one * 0.5 for one in outputs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return output.view(-1).view_as(output) if isinstance(output, torch.Tensor) else None

    if part.index == 0:  # where no input needs a gradient torch warns, and calls some of them
        return
    part.handles += [
        part.register_full_backward_hook(note),
        part.register_full_backward_pre_hook(before),
        part.register_forward_hook(after),
        part.linear.register_full_backward_hook(note),
    ]


def of_shape_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is a part of a vector of losses, with a dimension."""
    each = (output - target).square().mean(0)
    return torch.stack([each.mean(), each.sum()])[:1]


def in_a_tuple(output: torch.Tensor, target: torch.Tensor) -> Any:
    """A loss that is an element of a vector, in a tuple."""
    return (torch.stack([(output * target).mean(), output.sum()])[0],)


def expanded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is an expanded number."""
    return nn.functional.mse_loss(output, target).expand(1, 1)


CASES = {
    "views of kept tensors": Case(viewed, viewed_on, viewed_used, steps=3),
    "straight through": Case(linear, straight, linear),
    "the batch itself": Case(straight, straight, linear),
    "a value that no stage uses": Case(
        lambda part, x: (x, part.linear(x), x * 3),
        straight,
        lambda part, x, h, rest: part.linear(h),
    ),
    "one tensor twice": Case(twice, twice, twice_used, steps=2),
    "one tensor twice, straight through": Case(twice, straight, twice_used),
    "one constant twice": Case(
        lambda part, x: (part.linear(x), x, x),
        straight,
        lambda part, h, x, y: part.linear(h) * x + y,
    ),
    "an input and its activation": Case(
        lambda part, x: (x, part.linear(x)),
        lambda part, x, h: (h, part.linear(h) * x),
        lambda part, x, h: part.linear(h) * x,
    ),
    "views of each other": Case(sharing, sharing_on, sharing_used),
    "views of each other, straight through": Case(sharing, straight, sharing_used),
    "views of each other, recomputed": Case(
        in_graph_mode(sharing), in_graph_mode(sharing_on), sharing_used
    ),
    "parameters": Case(weights, weights_on, weights_used, evaluates=False),
    "parameters, straight through": Case(weights, straight, weights_used, evaluates=False),
    "buffers": Case(tables, tables_on, tables_used),
    "parts of a split": Case(
        many_parts, many_parts, lambda part, *values: part.linear(many_parts(part, *values)[2])
    ),
    "hooks": Case(linear, linear, linear, prepare=hooked),
    "hooks, several values": Case(twice, straight, twice_used, prepare=hooked),
    "hooks, views of each other": Case(sharing, sharing_on, sharing_used, prepare=hooked),
    "hooks, a value that no stage uses": Case(
        lambda part, x: (part.linear(x), x, part.linear(x)),
        lambda part, h, x, unused: (part.linear(h), x, unused),
        lambda part, h, x, unused: part.linear(h),
        prepare=hooked,
    ),
    "a loss with a dimension": Case(linear, linear, linear, loss=of_shape_one),
    "a loss in a tuple": Case(linear, linear, linear, loss=in_a_tuple),
    "an expanded loss": Case(linear, linear, linear, loss=expanded),
}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_outputs_may_be_views(num_ranks: int, transport: str) -> None:
    """Losses, gradients and what hooks are told equal the plain run's; kept tensors keep values."""
    assert all_differences(num_ranks, transport, CASES) == []
