"""The clipped norm over stages equals torch's on the whole model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reference import same_bits
from stretto.errors import InputError
from stretto.runtime.norm import check_clip_arguments, local_norms, total_norm, unique_parameters

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def model(seed: int) -> nn.Sequential:
    """Layers of odd sizes, mixed dtypes, one without a gradient, one with a frozen part."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for index in range(7):
        dtype = DTYPES[int(torch.randint(0, 3, (), generator=generator))]
        layer = nn.Linear(3 + index, 5 + 2 * index, dtype=dtype)
        for parameter in layer.parameters():
            shape = tuple(parameter.shape)
            parameter.grad = torch.randn(shape, generator=generator).to(dtype) * 10**index
        layers.append(layer)
    layers[2].bias.grad = None
    layers[4].weight.requires_grad_(False)
    layers[4].weight.grad = None
    return nn.Sequential(*layers)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, float("inf")])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_norm_over_ranks_has_the_bits_of_the_whole(norm_type: float, num_ranks: int) -> None:
    """Any way of dealing stages to ranks gives torch's own number, mixed dtypes included."""
    for seed in range(10):
        whole = model(seed)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e9, norm_type)
        gathered = [
            local_norms(
                unique_parameters({i: whole[i] for i in range(rank, 7, num_ranks)}), norm_type
            )
            for rank in range(num_ranks)
        ]
        total = total_norm(gathered, norm_type, torch.device("cpu"))
        assert same_bits(total, expected), (seed, total, expected)


def test_a_parameter_of_two_stages_counts_once() -> None:
    """A weight that two stages of a rank share enters the norm once."""
    shared = nn.Linear(2, 1, bias=False)
    shared.weight.grad = torch.tensor([[3.0, 4.0]])
    gathered = [local_norms(unique_parameters({0: shared, 3: nn.Sequential(shared)}), 2.0)]
    assert total_norm(gathered, 2.0, torch.device("cpu")).item() == 5.0


def test_no_gradients_anywhere_give_zero() -> None:
    """As in torch, the norm of nothing is 0."""
    assert total_norm([b"[]", b"[]"], 2.0, torch.device("cpu")).item() == 0.0


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (float("nan"), 2.0), (1.0, 0.0)])
def test_arguments_that_make_no_sense_are_named(max_norm: float, norm_type: float) -> None:
    """The bound must not be negative and the order must be positive."""
    with pytest.raises(InputError, match=r"max_norm is|norm_type is"):
        check_clip_arguments(max_norm, norm_type)
