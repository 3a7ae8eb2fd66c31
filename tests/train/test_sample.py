"""Writing text, with an engine that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stretto.errors import InputError
from stretto.train.sample import write_text
from stretto.train.text import Corpus

CORPUS = Corpus("abcd", torch.zeros(0), torch.zeros(0))


class NextLetter:
    """An engine on one rank whose model is sure that the next letter of the alphabet follows."""

    rank = loss_rank = 0
    num_ranks = 1

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def eval_step(self, inputs, *, return_outputs):
        """Scores that are right at every position."""
        self.shapes.add(tuple(inputs.shape))
        scores = 100.0 * torch.nn.functional.one_hot((inputs + 1) % 4, 4)
        return SimpleNamespace(outputs=scores)


class Unsure(NextLetter):
    """An engine whose model finds all letters alike."""

    def eval_step(self, inputs, *, return_outputs):
        """Equal scores."""
        return SimpleNamespace(outputs=torch.zeros(*inputs.shape, 4))


def write(engine, **changed) -> str:
    """Write ten letters after "ab"."""
    arguments = {"prompt": "ab", "length": 10, "context": 4, "seed": 0, **changed}
    return write_text(engine, CORPUS, **arguments)


def test_each_letter_follows_from_those_before():
    """The text goes on from the prompt's end, also when it is longer than the context."""
    engine = NextLetter()
    assert write(engine) == "abcdabcdabcd"
    assert write(engine, prompt="abcdabcdab", length=2) == "abcdabcdabcd"
    assert engine.shapes == {(1, 4)}


def test_a_seed_gives_one_text_and_leaves_other_random_numbers_alone():
    """The draw is the run's own: repeatable, and the global generator does not move."""
    before = torch.get_rng_state()
    assert write(Unsure()) == write(Unsure())
    assert write(Unsure()) != write(Unsure(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prompt_with_foreign_characters_is_refused():
    """A character the model does not know is named."""
    with pytest.raises(InputError, match="the character 'z'"):
        write(NextLetter(), prompt="z")
