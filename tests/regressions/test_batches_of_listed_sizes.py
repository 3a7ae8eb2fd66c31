"""Ready-made microbatches of unequal sizes meet targets that are one tensor.

Seen: inputs listed as microbatches of 5 and 3 rows were given targets cut into 4 and 4, so the loss
compared rows that do not belong together (where shapes could be broadcast, without an error). And
lists inside a tuple, of other lengths or sizes than the first, were found out after the ranks had
agreed to start, so that the other ranks waited until their time was up.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from reference import same_bits, toy_batch, toy_layers
from stretto.errors import InputError
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import gpipe
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss


def test_targets_are_cut_as_the_inputs_are_listed() -> None:
    """The loss is that of both lists, cut alike."""
    schedule = gpipe(num_ranks=1, num_microbatches=2)
    engine = Engine(split(toy_layers(2), schedule, rank=0), schedule, loss_fn=MSE)
    inputs, targets = toy_batch(8)
    listed = list(inputs.split([5, 3]))
    found = engine.step(listed, targets).microbatch_losses
    assert same_bits(found, engine.step(listed, list(targets.split([5, 3]))).microbatch_losses)


def misfit(rank: int, group: Any) -> str:
    """What is told of two lists that do not fit together."""
    schedule = gpipe(num_ranks=2, num_microbatches=2)
    engine = Engine(split(toy_layers(2), schedule, rank=rank), schedule, loss_fn=MSE, group=group)
    inputs, targets = toy_batch(8)
    with pytest.raises(InputError) as caught:
        engine.step((list(inputs.split(4)), list(inputs.split([5, 3]))), targets)
    return str(caught.value)


def test_lists_that_do_not_fit_are_named_before_the_step() -> None:
    """Every rank is told at once."""
    for text in run_ranks(misfit, 2, timeout_s=10):
        assert "microbatch 0 has 4 rows" in text
