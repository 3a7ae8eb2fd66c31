"""What stands in front of a message on any wire: what it is, and its layout where that changed."""

from __future__ import annotations

import struct
from typing import NamedTuple

from stretto.errors import TransportError
from stretto.ir import Action, Channel, edge_of
from stretto.runtime.wire.message import Layout

_HEADER = struct.Struct("<4sIIIQQ")
_MAGIC = b"strt"

HEADER_BYTES = _HEADER.size

Edge = tuple[int, int]
"""From which stage to which."""


class Header(NamedTuple):
    """From which stage to which, for which microbatch, and how many bytes of two parts follow."""

    source: int
    target: int
    microbatch: int
    layout_bytes: int
    payload_bytes: int


def pack_header(action: Action, layout_bytes: int, payload_bytes: int) -> bytes:
    """The header of the message that a SEND carries."""
    return _HEADER.pack(_MAGIC, *edge_of(action), action.microbatch, layout_bytes, payload_bytes)


def read_header(data: bytes, action: Action, channel: Channel) -> Header:
    """The header of the message that a RECV waits for.

    Raises:
        TransportError: it is of another message, or none.
    """
    magic, *numbers = _HEADER.unpack_from(data)
    header = Header(*numbers)
    if magic != _MAGIC or header[:3] != (*edge_of(action), action.microbatch):
        raise TransportError(
            f"{action} on channel {channel} got a message from stage {header.source} to stage "
            f"{header.target} for microbatch {header.microbatch}; both ranks must run the same "
            "schedule",
            action=str(action),
        )
    return header


class KnownLayouts:
    """The layout that was last told, per edge; both ends of a channel keep one."""

    def __init__(self) -> None:
        self._known: dict[Edge, Layout] = {}

    def get(self, action: Action) -> Layout | None:
        """The layout last told on the edge of a transfer."""
        return self._known.get(edge_of(action))

    def tell(self, action: Action, layout: Layout) -> bool:
        """Take over a layout; whether it is another one."""
        edge = edge_of(action)
        if self._known.get(edge) == layout:
            return False
        self._known[edge] = layout
        return True
