"""One tensor in two places of a value.

Seen: it arrived as two tensors. Their gradients were added up one after the other, not in the order
of the uses, so the last bits were not the plain run's; and a stage that changed one of them in
place did not change the other, as it does in the unsplit model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reference import same_bits
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


class Twice(nn.Module):
    """Its activation, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.sin(torch.arange(p.numel()) * 1.7).view_as(p))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        return h, h


class ByTurns(nn.Module):
    """Changes one of them, and uses both by turns."""

    def forward(self, h: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        h.mul_(1.3)
        return (h.sin() * 0.3 + same.cos() * 0.7 + h.tanh() * 1.1 + same.sigmoid() * 1.3).sum()


def compare(rank: int, group: Any) -> list[bool]:
    """Whether loss and gradients are the plain run's, of one microbatch."""
    whole, mine = [Twice(), ByTurns()], [Twice(), ByTurns()][rank]
    x = torch.cos(torch.arange(35.0)).view(5, 7)
    engine = Engine({rank: mine}, one_f_one_b(num_ranks=2, num_microbatches=1), group=group)
    result = engine.step(x)
    loss = whole[1](*whole[0](x))
    loss.backward()
    pairs = zip(mine.parameters(), whole[rank].parameters(), strict=True)
    same = [same_bits(one.grad, other.grad) for one, other in pairs]
    return [same_bits(result.loss, loss.detach().double()), *same]


def test_one_tensor_in_two_places_stays_one() -> None:
    """Loss and gradients have the plain run's bits."""
    for transport in ("threads", "gloo"):
        answers = run_ranks(compare, 2, transport=transport)
        assert all(one for answer in answers for one in answer)
