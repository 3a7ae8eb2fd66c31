"""The GPT: shapes, causality, initial scale, and sizes that are refused."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.errors import InputError
from stretto.models import build, gpt_layers

SIZES = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2, "context": 6}


def test_a_position_sees_no_later_symbol():
    """Changing a symbol changes no score before it."""
    model = build(gpt_layers(**SIZES))
    symbols = torch.zeros(1, 6, dtype=torch.long)
    changed = symbols.clone()
    changed[0, 4] = 3
    before, after = model(symbols), model(changed)
    assert before.shape == (1, 6, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_an_untrained_model_knows_nothing():
    """The first loss is close to that of a uniform guess."""
    model = build(gpt_layers(**SIZES))
    symbols = torch.arange(60).reshape(10, 6) % 11
    loss = torch.nn.functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flatten())
    assert abs(loss.item() - math.log(11)) < 0.02


def test_residual_outputs_start_smaller_with_depth():
    """What writes into the residual starts at 0.02 / sqrt(2 x layers)."""
    model = build(gpt_layers(**{**SIZES, "dim": 128, "num_layers": 8}))
    block = model.layer("3")
    assert block.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.up.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_every_layer_stands_alone():
    """There is one embedding, one layer per block and one head with its own weights."""
    layers = gpt_layers(**SIZES)
    names = set(build(layers).state_dict())
    assert len(layers) == 4
    assert {"0.symbols.weight", "3.scores.weight"} <= names


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_heads": 3}, "num_heads is 3; it must divide dim, which is 8"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_sizes_are_checked(changed, message):
    """A size that cannot be is named with its value and the rule."""
    with pytest.raises(InputError, match=message):
        gpt_layers(**{**SIZES, **changed})
