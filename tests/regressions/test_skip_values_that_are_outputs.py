"""A skip value that is also the stage's output.

Seen: its gradient has three parts or more, of which those of the next stage arrive added up, so the
last bits differ from those of one graph. That is how it is documented; with a view of the output as
the skip value, all bits are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.ir.calling import WithSkips
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks


class Making(nn.Module):
    """Its output is used by the next stage and, seen through a view, by the last."""

    skip_outputs = ("s",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 33)

    def forward(self, x: torch.Tensor) -> WithSkips:
        h = torch.tanh(self.linear(x))
        return WithSkips(h, {"s": h.view_as(h)})


class Using(nn.Module):
    """Uses its input several times, and the skip value if it is given one."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.skip_inputs = names
        self.linear = nn.Linear(33, 33)

    def forward(self, h: torch.Tensor, s: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.linear(h)) + h * 0.3 + h.sin()
        return h if s is None else h + s * 1.7


def stages() -> list[Any]:
    """Always with the same weights."""
    torch.manual_seed(0)
    return [Making(), Using(), Using("s")]


def gradients(rank: int, group: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> list[Any]:
    """Of this rank's stage, after a step."""
    mine = stages()[rank]
    schedule = gpipe(num_ranks=3, num_microbatches=2)
    engine = Engine({rank: mine}, schedule, loss_fn=nn.functional.mse_loss, group=group)
    engine.step(*batch)
    return [parameter.grad for parameter in mine.parameters()]


def test_a_view_of_the_output_as_the_skip_value_gives_equal_bits() -> None:
    """As the documentation promises."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 33), torch.randn(8, 33)
    first, second, third = stages()
    for x, t in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True):
        made = first(x)
        (nn.functional.mse_loss(third(second(made.output), made.skips["s"]), t) / 2).backward()
    plain = [one.grad for part in (first, second, third) for one in part.parameters()]
    answers = run_ranks(gradients, 3, (inputs, targets), transport="sockets")
    got = [one for answer in answers for one in answer]
    assert all(torch.equal(*pair) for pair in zip(plain, got, strict=True))
