"""What pipelines are compared with: plain microbatch accumulation, and toy models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

WIDTH = 4


def toy_layer(index: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """tanh(h W^T + b), with W[i][j] = 0.5 sin(1 + 16 l + 4 i + j) and b[i] = 0.1 cos(l + i)."""
    linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    weight = [
        [0.5 * math.sin(1 + 16 * index + 4 * i + j) for j in range(WIDTH)] for i in range(WIDTH)
    ]
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(weight, dtype=torch.float64))
        bias = [0.1 * math.cos(index + i) for i in range(WIDTH)]
        linear.bias.copy_(torch.tensor(bias, dtype=torch.float64))
    return nn.Sequential(linear, nn.Tanh())


def toy_layers(count: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """The toy model as a list of layers."""
    return [toy_layer(index, dtype) for index in range(count)]


def toy_batch(rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """x[n][j] = cos(0.3 n + j), target[n][j] = sin(0.2 n - j)."""
    n = torch.arange(rows, dtype=torch.float64)[:, None]
    j = torch.arange(WIDTH, dtype=torch.float64)
    return torch.cos(0.3 * n + j).to(dtype), torch.sin(0.2 * n - j).to(dtype)


class OddBlock(nn.Module):
    """A block of odd sizes whose bits depend on every order: norm, attention, GELU, residual."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.mix = nn.Linear(width, 3 * width, dtype=dtype)
        self.up = nn.Linear(width, 2 * width + 1, dtype=dtype)
        self.down = nn.Linear(2 * width + 1, width, dtype=dtype)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows, length, width = h.shape
        parts = self.mix(self.norm(h)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.transpose(1, 2).reshape(rows, length, width)
        return h + self.down(nn.functional.gelu(self.up(h)))


ODD_WIDTH = 33
ODD_LENGTH = 7


def odd_layers(count: int, dtype: torch.dtype, seed: int = 5) -> list[nn.Module]:
    """Blocks of odd sizes with weights drawn from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [OddBlock(ODD_WIDTH, 3, dtype) for _ in range(count)]


def odd_batch(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for the odd blocks."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, ODD_LENGTH, ODD_WIDTH)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


@dataclass
class Plain:
    """What plain accumulation gave in one step."""

    loss: torch.Tensor
    microbatch_losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def plain_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    num_microbatches: int,
) -> Plain:
    """Forward and backward of one microbatch after the other, each weighted by its rows."""
    rows = inputs.shape[0]
    total: torch.Tensor | None = None
    each: list[torch.Tensor] = []
    cuts = zip(
        torch.tensor_split(inputs, num_microbatches),
        torch.tensor_split(targets, num_microbatches),
        strict=True,
    )
    for x, t in cuts:
        loss = loss_fn(model(x), t)
        scaled = loss / (rows / x.shape[0])
        scaled.backward()
        each.append(loss.detach())
        total = scaled.detach() if total is None else total + scaled.detach()
    assert total is not None
    return Plain(total.double(), each, gradients_of(model))


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient there is, by parameter name."""
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every byte."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(_raw(first), _raw(second))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def differing(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], owned: Sequence[str]
) -> list[str]:
    """The owned names whose gradients are not equal in every bit."""
    assert set(found) == set(owned), (sorted(found), sorted(owned))
    return [name for name in owned if not same_bits(found[name], expected[name])]
