"""Values without a gradient that were changed in place where others hold them, too.

Seen: a stage passed a buffer (or its batch) on, a later stage changed it in place, and the buffer
of the first stage stayed as it was, though it would have changed in the unsplit model; likewise for
extras, of which every rank has its own copy. Autograd watches none of these, so nobody was told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.errors import ExecutionError
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks


class Keeping(nn.Module):
    """Passes its buffer on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table: torch.Tensor
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), self.table


class Passing(nn.Module):
    """Passes on what it is given."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Any:
        return x * 2, table


class Changing(nn.Module):
    """Changes the table that came from far."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * table.add_(1)


class Reading(nn.Module):
    """Changes a copy of the table."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * table.clone().add_(1)


class Masking(nn.Module):
    """Changes an extra in place."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask.mul_(2)


def told_of(rank: int, group: Any, stages: list[nn.Module], extras: dict[str, Any]) -> str:
    """What a step raises."""
    schedule = gpipe(num_ranks=len(stages), num_microbatches=2)
    engine = Engine({rank: stages[rank]}, schedule, loss_fn=nn.functional.mse_loss, group=group)
    try:
        engine.step(torch.ones(2, 3), torch.ones(2, 3), **extras)
    except ExecutionError as error:
        return str(error)
    return "nothing"


def test_a_buffer_that_travelled_through_a_stage_is_still_known_as_one() -> None:
    """Over two borders."""
    answers = run_ranks(told_of, 3, [Keeping(), Passing(), Changing()], {})
    assert all("2F0 (stage 2, microbatch 0)" in one for one in answers)
    assert all("stage 2: tensor 1 of what it was given was changed in place" in a for a in answers)


def test_a_buffer_that_is_only_read_may_travel() -> None:
    """Nothing is refused."""
    assert run_ranks(told_of, 3, [Keeping(), Passing(), Reading()], {}) == ["nothing"] * 3


def test_an_extra_may_not_be_changed_in_place() -> None:
    """Other stages have copies of it."""
    answers = run_ranks(told_of, 2, [nn.Linear(3, 3), Masking()], {"mask": torch.ones(2, 3)})
    told = "stage 1: mask was changed in place; it shares memory with what other stages are given"
    assert all(told in one for one in answers), answers
