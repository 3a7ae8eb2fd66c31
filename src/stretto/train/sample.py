"""Writing text with the model, one character per pipelined evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from stretto.ir.seeding import mixed_seed
from stretto.runtime import Engine
from stretto.train.text import Corpus, decode, encode

TEMPERATURE = 0.8
"""Scores are divided by this: below 1, likely characters become likelier."""


def write_text(
    engine: Engine, corpus: Corpus, *, prompt: str, length: int, context: int, seed: int
) -> str:
    """Continue a text; called on every rank, the same text comes back on each.

    The rank of the last stage draws each character from a generator of its own and tells the
    others, so no other random numbers change.

    Args:
        engine: The engine; its last stage returns scores of shape (1, T, V).
        corpus: Its symbols are the model's.
        prompt: What the text starts with.
        length: Characters to add.
        context: T, the longest sequence the model takes.
        seed: The run's seed.

    Raises:
        InputError: the prompt has a character that the corpus has not.
    """
    generator = torch.Generator().manual_seed(mixed_seed("sample", seed))
    numbers = encode(prompt, corpus.symbols)
    for _ in range(length):
        window = numbers[-context:]
        # Always T long: what follows the text cannot be seen from its end, and the shape stays.
        inputs = torch.nn.functional.pad(window, (0, context - len(window)))[None]
        scores = engine.eval_step(inputs, return_outputs=True).outputs
        drawn = torch.zeros(1, dtype=torch.long)
        if engine.rank == engine.loss_rank:
            drawn = _draw(scores[0, len(window) - 1], generator)
        if engine.num_ranks > 1:
            distributed.broadcast(drawn, src=engine.loss_rank)
        numbers = torch.cat([numbers, drawn])
    return decode(numbers, corpus.symbols)


def _draw(scores: Tensor, generator: torch.Generator) -> Tensor:
    likelihoods = torch.softmax(scores.float() / TEMPERATURE, dim=-1)
    return torch.multinomial(likelihoods, 1, generator=generator)
