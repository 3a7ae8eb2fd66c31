"""Which channels share a communicator, and what a rank hands to one at once."""

from __future__ import annotations

import pytest

from stretto.errors import InputError
from stretto.ir import Channel, Communicators, communicator_of, read_communicators, units
from stretto.ir.placement import loop
from stretto.ir.text import parse_orders

PROGRAM = parse_orders(
    "0F0 0SEND_F0 0FREE_F0 0RECV_B0 0F1 0SEND_F1 0FREE_F1 0B0 0RECV_B1 0B1\n"
    "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1FREE_B0 1F1 1B1 1SEND_B1 1FREE_B1",
    placement=loop(num_ranks=2),
)


def told(rank: int, communicators: Communicators, *, batched: bool = True) -> list[str]:
    """The units of a rank: communicator, then transfers with their positions."""
    return [
        f"{name}: "
        + " ".join(f"{action}/{place}" for place, action in zip(places, actions, strict=True))
        for name, places, actions in units(PROGRAM, rank, communicators, batched=batched)
    ]


def test_channels_of_one_name_share_a_communicator() -> None:
    """By themselves, by direction, or all together."""
    channels = [Channel(0, 1, "F"), Channel(1, 2, "F"), Channel(1, 0, "B")]
    names = {
        one.value: [communicator_of(channel, one) for channel in channels] for one in Communicators
    }
    assert names == {
        "per_channel": ["0->1F", "1->2F", "1->0B"],
        "per_direction": ["F", "F", "B"],
        "shared": ["all", "all", "all"],
    }


def test_units_hold_what_stands_between_two_compute_actions() -> None:
    """Frees do not part them, other communicators do not either, compute does."""
    assert told(0, Communicators.SHARED) == [
        "all: 0SEND_F0/1 0RECV_B0/3",
        "all: 0SEND_F1/5",
        "all: 0RECV_B1/8",
    ]
    assert told(0, Communicators.PER_DIRECTION) == [
        "F: 0SEND_F0/1",
        "B: 0RECV_B0/3",
        "F: 0SEND_F1/5",
        "B: 0RECV_B1/8",
    ]
    assert told(1, Communicators.PER_DIRECTION) == [
        "F: 1RECV_F0/0 1RECV_F1/1",
        "B: 1SEND_B0/4",
        "B: 1SEND_B1/8",
    ]


def test_unbatched_transfers_are_units_of_their_own() -> None:
    """As with single sends and receives."""
    assert told(1, Communicators.SHARED, batched=False) == [
        "all: 1RECV_F0/0",
        "all: 1RECV_F1/1",
        "all: 1SEND_B0/4",
        "all: 1SEND_B1/8",
    ]


def test_unknown_ways_of_sharing_are_named() -> None:
    """The error lists those there are."""
    assert read_communicators("shared") is Communicators.SHARED
    with pytest.raises(InputError, match="'one'; it must be one of per_channel, per_direction, sh"):
        read_communicators("one")
