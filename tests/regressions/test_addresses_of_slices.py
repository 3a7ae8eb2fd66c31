"""Slices between stages keep their place in memory modulo the width of a vector register.

Seen: a stage that got a slice of a wider tensor computed other last bits than the plain model. The
values, the strides and the shape were the same, but the received copy began at a multiple of 64
bytes and the slice did not, and the matrix product of this machine's library depends on that (in
about one of three small float32 products).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reference import same_bits
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


class Slice(nn.Module):
    """Returns all columns but the first of a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, 1:]


def modules(seed: int) -> list[nn.Module]:
    """The two stages, with weights drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)  # ranks as threads share the global one
    made: list[nn.Module] = [Slice(), nn.Linear(11, 7)]
    with torch.no_grad():
        for parameter in [*made[0].parameters(), *made[1].parameters()]:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return made


def differing(rank: int, group: Any) -> list[str]:
    """Which of 20 models differ from the plain run in loss or gradients."""
    wrong: list[str] = []
    for seed in range(20):
        whole, mine = nn.Sequential(*modules(seed)), modules(seed)[rank]
        x = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
        schedule = one_f_one_b(num_ranks=2, num_microbatches=3)
        engine = Engine({rank: mine}, schedule, loss_fn=nn.functional.mse_loss, group=group)
        result = engine.step(x, torch.zeros(9, 7))
        total: Any = 0
        for piece in x.split(3):
            loss = nn.functional.mse_loss(whole(piece), torch.zeros(3, 7)) / 3
            loss.backward()
            total = total + loss.detach()
        pairs = zip(mine.parameters(), whole[rank].parameters(), strict=True)
        if not same_bits(result.loss, total.double()):
            wrong.append(f"seed {seed}: loss")
        if not all(same_bits(one.grad, other.grad) for one, other in pairs):
            wrong.append(f"seed {seed}: gradients")
        engine.close()
    return wrong


def test_slices_between_stages_give_the_plain_bits() -> None:
    """Twenty small models that pass on a slice equal their plain runs, in processes and threads."""
    assert run_ranks(differing, 2, transport="sockets") == [[], []]
    assert run_ranks(differing, 2, transport="threads") == [[], []]
