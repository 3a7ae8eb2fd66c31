"""The text: numbers, the held-out part, and batches that every rank can make."""

from __future__ import annotations

import pytest
import torch

from stretto.errors import InputError
from stretto.train.text import (
    SHAKESPEARE,
    decode,
    encode,
    held_out_batch,
    make_corpus,
    read_text,
    training_batch,
)

TEXT = "to be, or not to be, that is the question: " * 20


def test_the_text_that_comes_along_is_clean():
    """It is about 1 MB of plain text from the first play's title to the last play's last line."""
    text = read_text(SHAKESPEARE)
    assert 1_000_000 < len(text) < 1_100_000
    assert text.isascii()
    assert text.startswith("THE COMEDY OF ERRORS\n")
    assert text.endswith("Let your indulgence set me free.\n")
    assert len(set(text)) == 77


def test_numbers_and_characters_go_both_ways():
    """Decoding what was encoded gives the text; a foreign character is named."""
    symbols = "".join(sorted(set(TEXT)))
    assert decode(encode(TEXT, symbols), symbols) == TEXT
    with pytest.raises(InputError, match="the character 'Z' does not occur"):
        encode("Z", symbols)


def test_the_end_of_the_text_is_held_out():
    """Both parts together are the text, and the second is the share asked for."""
    corpus = make_corpus(TEXT, held_out_share=0.25, context=8)
    assert len(corpus.held_out) == len(TEXT) // 4
    assert decode(torch.cat([corpus.train, corpus.held_out]), corpus.symbols) == TEXT


def test_a_text_too_short_for_a_sequence_is_refused():
    """The message names the part, its length and the context."""
    with pytest.raises(InputError, match=r"held-out part of 4 .* model\.context 64 .* least 65"):
        make_corpus(TEXT[:80], held_out_share=0.05, context=64)


def test_a_batch_depends_on_seed_and_step_only():
    """The same seed and step give the same batch, whatever else was drawn; others differ."""
    corpus = make_corpus(TEXT, held_out_share=0.1, context=8)

    def batch(seed, step):
        return training_batch(corpus, seed=seed, step=step, batch_size=4, context=8)[0]

    first = batch(0, 3)
    before = torch.get_rng_state()
    assert torch.equal(batch(0, 3), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(batch(0, 4), first)
    assert not torch.equal(batch(1, 3), first)
    assert not torch.equal(batch(3, 0), first)


def test_targets_are_the_inputs_moved_by_one():
    """Each target is the character after its input, in training and in evaluation."""
    corpus = make_corpus(TEXT, held_out_share=0.2, context=8)
    for inputs, targets in (
        training_batch(corpus, seed=0, step=0, batch_size=5, context=8),
        held_out_batch(corpus, num_sequences=5, context=8),
    ):
        assert inputs.shape == targets.shape == (5, 8)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_every_part_of_the_training_text_is_used():
    """Sequences start anywhere: the first and the last possible start both occur."""
    corpus = make_corpus("abcdefghijkl" + "xyz" * 4, held_out_share=0.5, context=8)
    inputs, targets = training_batch(corpus, seed=0, step=0, batch_size=200, context=8)
    assert set(decode(inputs[:, 0], corpus.symbols)) == set("abcd")
    assert corpus.symbols[int(targets.max())] == "l"


def test_held_out_sequences_do_not_overlap():
    """Asking for more sequences than fit gives those that fit, each character at most once."""
    corpus = make_corpus(TEXT, held_out_share=0.2, context=8)
    inputs, _ = held_out_batch(corpus, num_sequences=10**6, context=8)
    assert len(inputs) == (len(corpus.held_out) - 1) // 8
    assert torch.equal(inputs.flatten(), corpus.held_out[: inputs.numel()])


def test_a_missing_text_is_named(tmp_path):
    """A path that leads nowhere, or to something else than text, is refused by its key."""
    with pytest.raises(InputError, match=r"data\.text is .*none\.txt"):
        read_text(str(tmp_path / "none.txt"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match=r"data\.text is .*UTF-8"):
        read_text(str(binary))
