"""Engines made and closed again and again on the same ranks.

Seen: the second or a later engine of the same ranks died with "connection reset by peer", or hung.
The group it talked through had been made under the name of the one just destroyed, and found the
old addresses in the store. Every engine now meets under a number of its own.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from reference import toy_batch, toy_layers
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


def remake(rank: int, group: Any) -> dict[str, list[Any]]:
    """Twenty engines; the losses, and what each left behind in threads and open files."""
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    seen: dict[str, list[Any]] = {"loss": [], "threads": [], "files": []}
    for _ in range(20):
        stages = split(toy_layers(4), schedule, rank=rank)
        engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
        seen["loss"].append(engine.step(*toy_batch(8)).loss.item())
        engine.close()
        for thread in threading.enumerate():
            if thread.name.startswith("stretto"):
                thread.join(5)
        seen["threads"].append(threading.active_count())
        seen["files"].append(len(os.listdir("/proc/self/fd")))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2, "the user's own group still works"
    return seen


def test_engines_can_be_made_and_closed_many_times() -> None:
    """Twenty in a row are right, and leave neither threads nor open files behind."""
    for seen in run_ranks(remake, 2, transport="sockets"):
        assert seen["loss"] == pytest.approx([0.5520371942587701] * 20, rel=1e-12)
        assert len(set(seen["threads"])) == 1
        assert max(seen["files"][5:]) <= max(seen["files"][:5])
