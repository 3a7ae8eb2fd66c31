"""The text to learn: characters as numbers, a held-out part, and batches.

A batch is a function of seed and step, so every rank makes the same one and none is sent.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from stretto.errors import InputError
from stretto.ir.seeding import mixed_seed

SHAKESPEARE = "shakespeare"
"""Name of the text that comes with the package: nine plays, about 1 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A text as numbers, cut into a training part and a held-out part after it.

    Args:
        symbols: The characters there are, ascending; a character's number is its place here.
        train: Numbers of the training part.
        held_out: Numbers of the held-out part.
    """

    symbols: str
    train: Tensor
    held_out: Tensor


def read_text(name: str) -> str:
    """The text of this name: `"shakespeare"`, or a path to a UTF-8 file.

    Raises:
        InputError: there is no such file, or it is not UTF-8 text.
    """
    if name == SHAKESPEARE:
        return (files("stretto.train") / "data" / "shakespeare.txt").read_text("utf-8")
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"it must be {SHAKESPEARE!r} or the path of a UTF-8 text"
        raise InputError(f"data.text is {name!r}; {rule}: {error}") from None


def make_corpus(text: str, *, held_out_share: float, context: int) -> Corpus:
    """Number a text's characters and hold out its last part.

    Args:
        text: The text.
        held_out_share: Share of the text that is held out, in (0, 1).
        context: Length of a sequence; each part must hold one and the character after it.

    Raises:
        InputError: a part is shorter than that.
    """
    symbols = "".join(sorted(set(text)))
    numbers = encode(text, symbols)
    cut = round(len(text) * (1 - held_out_share))
    corpus = Corpus(symbols, numbers[:cut], numbers[cut:])
    for name, part in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(part) <= context:
            raise InputError(
                f"data.text has a {name} part of {len(part)} characters; with model.context "
                f"{context} it needs at least {context + 1}"
            )
    return corpus


def encode(text: str, symbols: str) -> Tensor:
    """Characters → numbers.

    Raises:
        InputError: a character is not among the symbols.
    """
    number_of = {symbol: number for number, symbol in enumerate(symbols)}
    try:
        return torch.tensor([number_of[symbol] for symbol in text], dtype=torch.long)
    except KeyError as error:
        raise InputError(f"the character {error} does not occur in data.text") from None


def decode(numbers: Tensor, symbols: str) -> str:
    """Numbers → characters."""
    return "".join(symbols[number] for number in numbers.tolist())


def training_batch(
    corpus: Corpus, *, seed: int, step: int, batch_size: int, context: int
) -> tuple[Tensor, Tensor]:
    """Sequences at random places of the training part, and the same moved on by one.

    Args:
        corpus: The text.
        seed: The run's seed.
        step: Number of the step, from 0.
        batch_size: B.
        context: T.

    Returns:
        Inputs and targets, each (B, T); the same on every rank.
    """
    generator = torch.Generator().manual_seed(mixed_seed("batch", seed, step))
    last_start = len(corpus.train) - context
    starts = torch.randint(last_start, (batch_size,), generator=generator)
    return _windows(corpus.train, starts, context)


def held_out_batch(corpus: Corpus, *, num_sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Sequences spread evenly over the held-out part, always the same.

    Args:
        corpus: The text.
        num_sequences: How many at most; fewer if more would overlap.
        context: T.

    Returns:
        Inputs and targets, each (B, T).
    """
    room = len(corpus.held_out) - 1
    number = min(num_sequences, room // context)
    starts = torch.arange(number) * (room // number)
    return _windows(corpus.held_out, starts, context)


def _windows(numbers: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = numbers[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
