"""A rank that closes its engine for another's death must not be blamed for it.

The farewell of such a witness can be read before the end of the dead rank's own connection.
"""

from __future__ import annotations

import socket

import pytest

from stretto.errors import RemoteError
from stretto.runtime.wire.control import Control
from stretto.runtime.wire.failure import Cause
from stretto.runtime.wire.progress import Place


def _control(rank: int, connections: dict[int, socket.socket]) -> Control:
    return Control(
        rank, connections, describe=lambda: Place("somewhere", False), on_failure=lambda _: None
    )


def test_the_farewell_of_a_witness_names_the_dead_rank() -> None:
    """Both where a note is missing and where a transfer broke off."""
    to_the_dead, of_the_dead = socket.socketpair()
    ours, theirs = socket.socketpair()
    mine, witness = _control(0, {1: to_the_dead, 2: ours}), _control(2, {0: theirs})
    witness.close("an earlier step failed", Cause(rank=1, message="rank 1 has died"))
    with pytest.raises(RemoteError, match=r"^rank 1 has died") as caught:
        mine.exchange(b"", [0, 1, 2], what="the step", timeout_s=20)
    assert caught.value.rank == 1
    cause = mine.cause_within(20)
    assert cause is not None
    assert (cause.rank, cause.has_left) == (1, True)
    mine.close("the end")
    of_the_dead.close()


def test_the_farewell_of_a_rank_that_means_it_names_that_rank() -> None:
    """It closed its engine, and nothing had failed."""
    ours, theirs = socket.socketpair()
    mine, other = _control(0, {1: ours}), _control(1, {0: theirs})
    other.close("close() was called")
    with pytest.raises(RemoteError, match=r"^rank 1 has closed its engine: close\(\) was called$"):
        mine.exchange(b"", [0, 1], what="the step", timeout_s=20)
    mine.close("the end")
