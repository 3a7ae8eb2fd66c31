"""Outputs that are asked for, of a last stage that makes all of them in the same memory.

Seen: `result.outputs` held the last microbatch's output once for every microbatch. References were
kept until the end of the step, when all of them showed the same buffer. Now copies are.
"""

from __future__ import annotations

import torch
from torch import nn

from stretto.runtime import Engine
from stretto.schedules import one_f_one_b


class InOneBuffer(nn.Module):
    """Doubles its input, into memory that it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2, out=self.memory)


def test_outputs_in_one_buffer_are_those_of_each_microbatch() -> None:
    """Three rows in three microbatches give their doubles, not the last one three times."""
    schedule = one_f_one_b(num_ranks=1, num_microbatches=3)
    result = Engine({0: InOneBuffer()}, schedule).eval_step(torch.arange(6.0).view(3, 2))
    assert result.outputs.tolist() == [[0, 2], [4, 6], [8, 10]]
