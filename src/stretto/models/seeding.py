"""Random numbers as a function of what they are for, not of what was drawn before."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from stretto.ir.seeding import GENERATOR_LOCK


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """Run a block with every torch generator seeded; afterwards they are as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with GENERATOR_LOCK, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
