"""A decoder-only GPT as a list of layers that can be cut between any two.

Shapes: B sequences, T positions, D width, H heads, V symbols.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.errors import InputError
from stretto.models.specs import LayerSpec

INIT_STD = 0.02


class Embedding(nn.Module):
    """Symbol and position embeddings, added."""

    def __init__(self, vocab_size: int, dim: int, context: int, dropout: float) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.symbols.weight, std=INIT_STD)
        nn.init.normal_(self.positions.weight, std=INIT_STD)

    def forward(self, symbols: Tensor) -> Tensor:
        """(B, T) symbols → (B, T, D)."""
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        return self.dropout(self.symbols(symbols) + self.positions(positions))


class Block(nn.Module):
    """Causal self-attention and a GELU network, each after a layer norm and added to its input.

    Args:
        dim: Width.
        num_heads: Heads; they divide the width.
        dropout: Share of attention weights and of residual outputs that is dropped in training.
        residual_std: Standard deviation of the initial weights that write into the residual.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(dim)
        self.query_key_value = _linear(dim, 3 * dim, INIT_STD)
        self.attention_out = _linear(dim, dim, residual_std)
        self.norm_2 = nn.LayerNorm(dim)
        self.up = _linear(dim, 4 * dim, INIT_STD)
        self.down = _linear(4 * dim, dim, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        hidden = hidden + self.dropout(self._attend(self.norm_1(hidden)))
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm_2(hidden)))))

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, D/H)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class Head(nn.Module):
    """Final norm and one score per symbol; its weights are its own."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.scores = nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.scores.weight, std=INIT_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → (B, T, V)."""
        return self.scores(self.norm(hidden))


def gpt_layers(
    *,
    vocab_size: int,
    dim: int,
    num_layers: int,
    num_heads: int,
    context: int,
    dropout: float = 0.0,
) -> list[LayerSpec]:
    """Describe a GPT: an embedding, `num_layers` blocks and a head; nothing is built yet.

    Args:
        vocab_size: Number of symbols.
        dim: Width.
        num_layers: Number of blocks, at least 1.
        num_heads: Attention heads; they divide the width.
        context: Longest sequence.
        dropout: Share dropped in training, in [0, 1).

    Raises:
        InputError: a size is not positive, or the heads do not divide the width.
    """
    sizes = {
        "vocab_size": vocab_size,
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "context": context,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}; it must be at least 1")
    if dim % num_heads:
        raise InputError(f"num_heads is {num_heads}; it must divide dim, which is {dim}")
    if not 0 <= dropout < 1:
        raise InputError(f"dropout is {dropout}; it must lie in [0, 1)")
    residual_std = INIT_STD / math.sqrt(2 * num_layers)
    block = LayerSpec(Block, dim, num_heads, dropout, residual_std)
    return [
        LayerSpec(Embedding, vocab_size, dim, context, dropout),
        *[block] * num_layers,
        LayerSpec(Head, dim, vocab_size),
    ]


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer
