"""Learning rate and AdamW."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from stretto.train.optimizer import learning_rate, make_optimizer, set_learning_rate

RATE = {"num_steps": 100, "peak": 2.0, "warmup_share": 0.05, "final_share": 0.1}


def test_the_rate_rises_to_its_peak_and_falls_to_its_end():
    """It rises in a line over the first steps, peaks, and ends at the final share."""
    rates = [learning_rate(step, **RATE) for step in range(100)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert max(rates) == rates[4]
    assert rates[99] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert learning_rate(51, **RATE) == pytest.approx(0.2 + 1.8 / 2, abs=0.02)


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_short_runs_have_a_rate(num_steps):
    """A run of any length has a positive rate at every step, with or without a rise."""
    for share in (0.0, 0.05, 1.0):
        for step in range(num_steps):
            rate = learning_rate(
                step, num_steps=num_steps, peak=1.0, warmup_share=share, final_share=0.1
            )
            assert 0 < rate <= 1


def test_only_matrices_decay():
    """With no gradient to follow, weights shrink by the decay and biases and norms stay."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer([model], learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    optimizer.step()
    after = model.state_dict()
    assert torch.allclose(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])


def test_one_optimizer_per_stage_does_what_one_for_all_does():
    """Stepping the halves of a model apart gives bit for bit what stepping the whole gives."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    halves = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    halves.load_state_dict(whole.state_dict())
    settings = {"learning_rate": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [
        make_optimizer([whole], **settings),
        make_optimizer([halves[0]], **settings),
        make_optimizer([halves[1]], **settings),
    ]
    for _ in range(3):
        for model in (whole, halves):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, halves.state_dict()[name])


def test_a_rank_without_parameters_has_an_optimizer_too():
    """Stages without parameters make an optimizer whose step does nothing."""
    optimizer = make_optimizer(
        [nn.Identity()], learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1
    )
    set_learning_rate(optimizer, 0.2)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
