"""Received activations and their gradients lived on after their backward.

Seen: 200 steps of large payloads grew by two payloads per microbatch and step on every rank but the
first, until Python's collector ran, which it seldom does for so few objects. A node of the graph
held the slot for its gradient, and the slot held the node. Failed steps had circles, too: an
error that is kept holds the frames it went through, and these the place where it is kept.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from stretto.runtime import Engine, InProcessHub
from stretto.schedules import gpipe
from stretto.testing import run_ranks


class Watched(nn.Module):
    """Keeps weak references to the gradients of its inputs, and breaks on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.breaks = False

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            raise ValueError("broken on purpose")
        self.seen.append(weakref.ref(h))
        if h.requires_grad:
            h.register_hook(lambda gradient: self.seen.append(weakref.ref(gradient)))
        return h * self.weight


def count_alive(rank: int, group: Any, breaks: bool, all_done: threading.Barrier) -> int:
    """How many inputs and gradients are alive after a step, with the collector off."""
    module = Watched()
    schedule = gpipe(num_ranks=2, num_microbatches=2)
    engine = Engine({rank: module}, schedule, loss_fn=nn.functional.mse_loss, group=group)
    engine.step(torch.ones(4, 3), torch.ones(4, 3))
    module.breaks = breaks and rank == 1
    told = ""
    try:
        engine.step(torch.ones(4, 3), torch.ones(4, 3))
    except Exception as error:
        told = str(error)
    assert breaks == bool(told)
    all_done.wait()
    return sum(one() is not None for one in module.seen)


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_alive_after_a_step_or_its_failure(breaks: bool) -> None:
    """No input and no gradient of a stage is left, with the collector off."""
    gc.disable()
    try:
        assert run_ranks(count_alive, 2, breaks, threading.Barrier(2), timeout_s=20) == [0, 0]
    finally:
        gc.enable()


def test_threads_forget_what_they_have_exchanged() -> None:
    """The hub kept every note of every step, and every batch that one rank sent to all."""
    hub = InProcessHub(1)
    schedule = gpipe(num_ranks=1, num_microbatches=1)
    engine = Engine({0: Watched()}, schedule, loss_fn=nn.functional.mse_loss, group=hub.group(0))
    for _ in range(3):
        engine.step(torch.ones(2, 3), torch.ones(2, 3))
    assert not hub._rooms[0]._rounds
