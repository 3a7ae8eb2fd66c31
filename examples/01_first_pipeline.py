"""How do I train a model cut over four ranks, and is it still the same model?

Four ranks as threads of this process, so that it runs anywhere; with processes only the last line
of `main` changes (`transport="gloo"`), and under torchrun `group` is your process group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto import Engine, LayerSpec, split
from stretto.models import build
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks

LAYERS = [
    LayerSpec(nn.Linear, 16, 64),
    LayerSpec(nn.Tanh),
    *[LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Tanh)] * 3,
    LayerSpec(nn.Linear, 64, 1),
]
SCHEDULE = one_f_one_b(num_ranks=4, num_microbatches=8)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any rank can make it: it depends on the step only."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True).sqrt()


def train(rank: int, group: Any) -> list[float]:
    """What every rank runs; only its own layers are built."""
    stages = split(LAYERS, SCHEDULE, rank=rank)
    engine = Engine(stages, SCHEDULE, loss_fn=nn.functional.mse_loss, group=group)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    losses = []
    for step in range(20):
        result = engine.step(*batch(step))  # the same call on every rank
        engine.clip_grad_norm_(1.0)  # the norm of the whole model
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None, "every rank gets the loss, unless told otherwise"
        losses.append(result.loss.item())
    engine.close()
    return losses


def train_plainly() -> list[float]:
    """The same in one process, without stretto's engine: microbatch after microbatch."""
    model = build(LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(20):
        inputs, targets = batch(step)
        total = torch.zeros(())
        for x, t in zip(inputs.tensor_split(8), targets.tensor_split(8), strict=True):
            loss = nn.functional.mse_loss(model(x), t) / 8
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def main() -> None:
    """Compare both, bit for bit."""
    torch.set_num_threads(1)
    piped = run_ranks(train, 4)[0]
    print(f"loss {piped[0]:.4f} -> {piped[-1]:.4f} on four ranks")
    print(f"equal to the plain run in every bit: {piped == train_plainly()}")


if __name__ == "__main__":
    main()
