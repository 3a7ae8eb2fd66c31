"""How a program's channels share communicators, and what a rank hands to one of them at once.

NCCL has no tags: a communicator matches the sends from a rank to a rank with the receives there
by their order alone, and runs what a rank gives it one unit after the other. So which channels
share a communicator decides whether a program ends, and is told with the program:

    per_channel     each directed pair of ranks has one for activations and one for gradients
    per_direction   one carries all activations ("F"), one all gradients ("B")
    shared          one carries everything ("all")

A unit is what `torch.distributed.batch_isend_irecv` takes: transfers that a rank reaches with no
compute in between, on one communicator. Verifier and transports both cut units here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from stretto.errors import InputError
from stretto.ir.action import FREES, RECEIVES, SENDS, Action
from stretto.ir.deps import Channel, channel_of
from stretto.ir.schedule import Schedule

_UNITED = SENDS | RECEIVES


class Communicators(str, enum.Enum):
    """Which channels share a communicator."""

    PER_CHANNEL = "per_channel"
    PER_DIRECTION = "per_direction"
    SHARED = "shared"

    def __str__(self) -> str:
        return self.value


class Unit(NamedTuple):
    """Transfers of one rank that start together on one communicator; not empty.

    Args:
        communicator: Its name, see `communicator_of`.
        positions: Where the transfers stand in the rank's order.
        actions: The SENDs and RECVs themselves, in that order.
    """

    communicator: str
    positions: tuple[int, ...]
    actions: tuple[Action, ...]


def read_communicators(word: Communicators | str) -> Communicators:
    """The value with this name.

    Raises:
        InputError: there is none.
    """
    known = [one.value for one in Communicators]
    if str(word) not in known:
        raise InputError(f"communicators is {str(word)!r}; it must be one of {', '.join(known)}")
    return Communicators(str(word))


def communicator_of(channel: Channel, communicators: Communicators) -> str:
    """The name of the communicator that carries a channel; channels of one name share it.

    Example:
        >>> communicator_of(Channel(0, 1, "F"), Communicators.PER_DIRECTION)
        'F'
    """
    match communicators:
        case Communicators.PER_CHANNEL:
            return str(channel)
        case Communicators.PER_DIRECTION:
            return channel.direction
        case Communicators.SHARED:
            return "all"


def units(
    program: Schedule,
    rank: int,
    communicators: Communicators = Communicators.PER_DIRECTION,
    *,
    batched: bool = True,
) -> tuple[Unit, ...]:
    """What a rank of a lowered program hands to its communicators, in order of the first transfer.

    A FREE belongs to the send before it and ends no unit; everything else that is no transfer does.

    Args:
        program: A lowered schedule.
        rank: The rank.
        communicators: Which channels share one.
        batched: False: every transfer is a unit of its own, as with single `isend` and `irecv`.

    Cost: linear in the number of the rank's actions.
    """
    found: list[tuple[str, list[int], list[Action]]] = []
    names: dict[Channel, str] = {}
    open_units: dict[str, tuple[str, list[int], list[Action]]] = {}
    for position, item in enumerate(program.ranks[rank]):
        if not isinstance(item, Action) or item.kind not in _UNITED:
            if not isinstance(item, Action) or item.kind not in FREES:
                open_units.clear()
            continue
        channel = channel_of(item, program)
        if channel not in names:
            names[channel] = communicator_of(channel, communicators)
        name = names[channel]
        unit = open_units.get(name) if batched else None
        if unit is None:
            unit = open_units[name] = (name, [], [])
            found.append(unit)
        unit[1].append(position)
        unit[2].append(item)
    return tuple(Unit(name, tuple(places), tuple(actions)) for name, places, actions in found)
