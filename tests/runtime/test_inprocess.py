"""Ranks as threads: the three rules of sending, and failure."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from stretto.errors import InputError, RemoteError, TransportError
from stretto.ir import Action, Channel, Kind
from stretto.runtime import InProcessHub
from stretto.runtime.wire.message import Message, make_message

CHANNEL = Channel(0, 1, "F")
SEND, RECEIVE = Action(0, Kind.SEND_F, 0), Action(1, Kind.RECV_F, 0)


def message(value: float) -> Message:
    """A message of one number."""
    return make_message([torch.tensor([value])], ("tensor",), [False])


def pair(rule: str) -> tuple[InProcessHub, Any, Any]:
    """Two ranks with one channel from 0 to 1."""
    hub = InProcessHub(2, rule=rule, timeout_s=2)
    return hub, *(hub.join(rank).connect([CHANNEL]) for rank in range(2))


def test_buffered_sends_are_over_at_once() -> None:
    """A send needs no receiver."""
    _, left, right = pair("buffered")
    assert left.send(CHANNEL, SEND, message(7)).is_done
    assert right.receive(CHANNEL, RECEIVE).wait(0).tensors[0].item() == 7


def test_rendezvous_sends_wait_for_their_receive_without_blocking() -> None:
    """A send returns at once and is over when its receive is posted, first to first."""
    _, left, right = pair("rendezvous")
    sends = [left.send(CHANNEL, SEND, message(value)) for value in (1, 2)]
    assert not sends[0].is_done
    assert right.receive(CHANNEL, RECEIVE).wait(0).tensors[0].item() == 1
    assert sends[0].is_done
    assert not sends[1].is_done


def test_blocking_sends_sit_until_the_receive_is_posted() -> None:
    """The sender's thread is held until the other side posts."""
    _, left, right = pair("blocking")
    returned = threading.Event()

    def sender() -> None:
        left.send(CHANNEL, SEND, message(3))
        returned.set()

    threading.Thread(target=sender, daemon=True).start()
    assert not returned.wait(0.05)
    right.receive(CHANNEL, RECEIVE)
    assert returned.wait(2)


def test_what_was_sent_does_not_change_with_the_senders_tensor() -> None:
    """The message is what it was at the send."""
    _, left, right = pair("rendezvous")
    tensor = torch.tensor([1.0])
    left.send(CHANNEL, SEND, make_message([tensor], ("tensor",), [False]))
    tensor.fill_(9)
    assert right.receive(CHANNEL, RECEIVE).wait(0).tensors[0].item() == 1


def test_a_failed_rank_wakes_those_that_wait() -> None:
    """Receives and exchanges under way end with the name of the rank that failed."""
    hub, _, right = pair("buffered")
    pending = right.receive(CHANNEL, RECEIVE)
    threading.Timer(0.02, lambda: hub.fail(0, ValueError("boom"))).start()
    with pytest.raises(RemoteError, match="rank 0 failed: ValueError: boom"):
        pending.wait(2)
    with pytest.raises(RemoteError, match="rank 0 failed: ValueError: boom"):
        hub.join(1).gather(b"", "the test")


def test_a_wait_past_its_limit_names_action_and_channel() -> None:
    """A receive nobody answers ends, saying which."""
    _, _, right = pair("buffered")
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"1RECV_F0 on channel 0->1F waited 0.05 s"):
        right.receive(CHANNEL, RECEIVE).wait(0.05)
    assert time.monotonic() - start < 2


def test_a_late_rank_is_named() -> None:
    """An exchange that not all ranks join says who is missing."""
    hub = InProcessHub(3, timeout_s=0.05)
    with pytest.raises(TransportError, match=r"ranks \[0, 2\], which did not come to the test"):
        hub.join(1).gather(b"", "the test")


@pytest.mark.parametrize(("ranks", "rule"), [(0, "buffered"), (2, "eager")])
def test_hubs_refuse_what_makes_no_sense(ranks: int, rule: str) -> None:
    """Numbers and rules are checked, and named."""
    with pytest.raises(InputError, match=r"num_ranks is 0|'eager'"):
        InProcessHub(ranks, rule=rule)
