"""Ranks as threads build and run with the weights and masks of ranks as processes.

Seen: a small example gave other losses from run to run. All threads of a process share torch's
default generator, and two ranks that built their layers at the same time drew from each other's
seeds. Whoever seeds the generator now holds one lock until it is as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.models import LayerSpec, build, split
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks

LAYERS = [LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Dropout, 0.3)] * 8
SCHEDULE = one_f_one_b(num_ranks=4, num_microbatches=8)


def work(rank: int, group: Any) -> tuple[list[torch.Tensor], float]:
    """A rank's first weights, and the loss of a step with dropout."""
    stages = split(LAYERS, SCHEDULE, rank=rank)
    weights = [p.detach().clone() for stage in stages.values() for p in stage.parameters()]
    engine = Engine(stages, SCHEDULE, loss_fn=nn.functional.mse_loss, group=group)
    batch = torch.ones(16, 64)
    loss = engine.step(batch, batch).loss.item()
    engine.close()
    return weights, loss


def test_threads_have_the_weights_and_masks_of_processes() -> None:
    """Five times threads, once processes: the same weights and the same loss."""
    expected = list(build(LAYERS).parameters())
    losses = set()
    for transport in ("threads",) * 5 + ("gloo",):
        answers = run_ranks(work, 4, transport=transport)
        weights = [one for mine, _ in answers for one in mine]
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
        losses |= {loss for _, loss in answers}
    assert len(losses) == 1
