"""A rank that slept through a step's end finds all notes there, and must not take it for whole.

The others waited, gave up and said so; the sleeper's step used to return, and its optimizer would
have stepped alone.
"""

from __future__ import annotations

import socket

import pytest

from stretto.errors import HangError, RemoteError
from stretto.runtime.wire.control import Control
from stretto.runtime.wire.failure import cause_of
from stretto.runtime.wire.progress import Place


def _control(rank: int, connection: socket.socket) -> Control:
    return Control(
        rank,
        {1 - rank: connection},
        describe=lambda: Place("somewhere", False),
        on_failure=lambda _: None,
    )


def test_a_step_that_others_gave_up_fails_on_the_late_rank_too() -> None:
    """Though the note it wants had been sent before."""
    ours, theirs = socket.socketpair()
    other = _control(1, theirs)
    with pytest.raises(HangError) as hung:
        other.exchange(b"note", [0, 1], what="the losses of the step", timeout_s=0.05)
    other.tell_failure(cause_of(1, hung.value, is_final=True))
    late = _control(0, ours)
    with pytest.raises(RemoteError, match=r"^rank 1 waited 0.05 s for ranks \[0\]"):
        late.exchange(b"note", [0, 1], what="the losses of the step", timeout_s=20)
    late.close("the end")
    other.close("the end")


def test_a_rank_that_left_after_its_note_does_no_harm() -> None:
    """All have what they need."""
    ours, theirs = socket.socketpair()
    other = _control(1, theirs)
    with pytest.raises(HangError):
        other.exchange(b"note", [0, 1], what="the losses of the step", timeout_s=0.05)
    other.close("its program has ended")
    late = _control(0, ours)
    answer = late.exchange(b"mine", [0, 1], what="the losses of the step", timeout_s=20)
    assert answer == [b"mine", b"note"]
    late.close("the end")
