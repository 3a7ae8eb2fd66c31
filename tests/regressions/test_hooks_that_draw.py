"""Hooks that draw random numbers.

Seen: a hook in front of a forward drew from the stream that had just been seeded for the stage, so
dropout masks depended on what hooks do; and its own draws were the same ones for ever, since they
came from that seed. Hooks now run outside, on the user's stream.
"""

from __future__ import annotations

import torch
from torch import nn

from reference import same_bits
from stretto.runtime import Engine
from stretto.schedules import gpipe


def run(draws: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The outputs of a stage that is one dropout layer, and what a hook drew."""
    schedule = gpipe(num_ranks=1, num_microbatches=2)
    engine = Engine({0: nn.Dropout(0.5)}, schedule, loss_fn=nn.functional.mse_loss, seed=1)
    drawn: list[torch.Tensor] = []
    if draws:
        engine.register_hook("before_forward", lambda event: drawn.append(torch.rand(8)))
    outputs = engine.step(torch.ones(4, 16), torch.ones(4, 16), return_outputs=True).outputs
    return outputs, drawn


def test_a_hook_that_draws_changes_no_mask() -> None:
    """Masks are the same with and without it, and it draws what the user's stream gives."""
    torch.manual_seed(0)
    expected = torch.rand(16)
    torch.manual_seed(0)
    outputs, drawn = run(draws=True)
    assert same_bits(outputs, run(draws=False)[0])
    assert same_bits(torch.cat(drawn), expected)
