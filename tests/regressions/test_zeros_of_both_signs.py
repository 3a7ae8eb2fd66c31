"""Numbers between stages that are equal and not the same.

Seen: a stage that sent -0.0 in one microbatch and 0.0 in the next was read as sending -0.0 for
ever, since the layout that holds the number seemed unchanged. And nan, which is not equal to
itself, was told anew in every microbatch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


class Sends(nn.Module):
    """Sends a number with each microbatch."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.numbers = iter(numbers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return x * 1, next(self.numbers)


class Notes(nn.Module):
    """Notes the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor, number: float) -> torch.Tensor:
        self.seen.append(str(number))
        return x.mean()


def send(rank: int, group: Any, numbers: list[float]) -> Any:
    """What the last stage noted, and the first one's number of layouts."""
    stages = [Sends(numbers), Notes()]
    schedule = one_f_one_b(num_ranks=2, num_microbatches=len(numbers))
    engine = Engine({rank: stages[rank]}, schedule, group=group)
    engine.eval_step(torch.ones(len(numbers), 1), num_microbatches=len(numbers))
    engine.close()
    return engine.metadata_count if rank == 0 else stages[1].seen


def test_numbers_arrive_with_their_sign_and_nan_is_told_once() -> None:
    """Zeros of both signs differ, and nan is the same as nan."""
    assert run_ranks(send, 2, [-0.0, 0.0, -0.0], transport="sockets")[1] == ["-0.0", "0.0", "-0.0"]
    assert run_ranks(send, 2, [math.nan, float("nan")], transport="sockets") == [1, ["nan", "nan"]]
