"""Messages over stream sockets, one per channel, in both directions of the pipeline.

A message is a header, its layout if that has changed, and the bytes of its tensors. What fits into
the socket's buffer is written at once by the rank itself; a thread per channel writes the rest, and
one reads, into fresh memory, as soon as the receive is posted. The kernel tells of a peer's death
even in the middle of a message, and ending a connection wakes all that wait on it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from stretto.errors import TransportError
from stretto.ir import Action, Channel, Schedule
from stretto.runtime.wire.framing import HEADER_BYTES, KnownLayouts, pack_header, read_header
from stretto.runtime.wire.message import (
    Message,
    decode_layout,
    encode_layout,
    pack,
    payload_bytes,
    unpack,
)
from stretto.runtime.wire.transport import Pending
from stretto.runtime.wire.worker import Worker


class SocketTransport:
    """Messages between processes over connections of their own.

    Args:
        outgoing: Channels that start here, each with its connection.
        incoming: Channels that end here, likewise; all are owned from now on.
    """

    def __init__(
        self,
        outgoing: Mapping[Channel, socket.socket],
        incoming: Mapping[Channel, socket.socket],
    ) -> None:
        self._metadata_count = 0
        self._senders = {channel: _Sender(channel, one) for channel, one in outgoing.items()}
        self._receivers = {channel: _Receiver(channel, one) for channel, one in incoming.items()}

    def begin(self, program: Schedule) -> None:
        """Channels are streams of their own, so nothing is to be known beforehand."""

    def send(self, channel: Channel, action: Action, message: Message) -> Pending:
        """Copy the message out of the sender's memory, and write what can be written."""
        message.check_unchanged()
        pending, is_new = self._senders[channel].send(action, message)
        self._metadata_count += is_new
        return pending

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Let the channel's thread read the next message."""
        pending = Pending(action, channel)
        self._receivers[channel].worker.put(_Posted(pending))
        return pending

    def metadata_count(self) -> int:
        """How many layouts this rank has sent."""
        return self._metadata_count

    def abort(self, error: BaseException) -> None:
        """Fail all transfers and end the connections, from any thread."""
        for end in (*self._senders.values(), *self._receivers.values()):
            end.worker.fail(error)
            with suppress(OSError):
                end.connection.shutdown(socket.SHUT_RDWR)
            end.worker.stop()

    def close(self) -> None:
        """End connections and threads; what was sent before still arrives."""
        for end in (*self._senders.values(), *self._receivers.values()):
            end.worker.stop()
        for receiver in self._receivers.values():
            with suppress(OSError):
                receiver.connection.shutdown(socket.SHUT_RD)


@dataclass(slots=True)
class _Parcel:
    """What is left to be written of a message."""

    parts: list[memoryview]
    pending: Pending


@dataclass(slots=True)
class _Posted:
    pending: Pending


class _Sender:
    def __init__(self, channel: Channel, connection: socket.socket) -> None:
        self.connection = connection
        self._channel = channel
        self._known = KnownLayouts()
        self.worker: Worker[_Parcel] = Worker(f"send-{channel}", self._write, connection.close)

    def send(self, action: Action, message: Message) -> tuple[Pending, bool]:
        layout = message.layout
        pending = Pending(action, self._channel)
        is_new = self._known.tell(action, layout)
        told = encode_layout(layout) if is_new else b""
        frame = torch.empty(payload_bytes(layout), dtype=torch.uint8)
        pack(message, frame, 0)
        header = pack_header(action, len(told), frame.numel())
        parts = [memoryview(header + told), _bytes_of(frame)]
        if self.worker.is_idle:
            self._write_now(parts)
        if parts:
            self.worker.put(_Parcel(parts, pending))
        else:
            pending.finish(time.perf_counter_ns())
        return pending, is_new

    def _write_now(self, parts: list[memoryview]) -> None:
        """Write what there is room for, without waiting; an error shows in the thread again."""
        with suppress(OSError):
            _drop(parts, self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT))

    def _write(self, job: _Parcel) -> None:
        while job.parts:
            try:
                _drop(job.parts, self.connection.sendmsg(job.parts))
            except OSError as error:
                raise TransportError(
                    f"rank {self._channel.target} takes nothing more: {error}"
                ) from error
        job.pending.finish(time.perf_counter_ns())


def _bytes_of(frame: torch.Tensor) -> memoryview:
    """The memory of a frame of bytes."""
    array: Any = frame.numpy()
    return memoryview(array)


def _drop(parts: list[memoryview], count: int) -> None:
    """Take `count` bytes away from the front."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]


class _Receiver:
    def __init__(self, channel: Channel, connection: socket.socket) -> None:
        self.connection = connection
        self._channel = channel
        self._known = KnownLayouts()
        self.worker: Worker[_Posted] = Worker(f"receive-{channel}", self._read, connection.close)

    def _read(self, job: _Posted) -> None:
        job.pending.message = self._message(job.pending.action)
        job.pending.finish(time.perf_counter_ns())

    def _message(self, action: Action) -> Message:
        header = read_header(self._bytes(HEADER_BYTES), action, self._channel)
        if header.layout_bytes:
            self._known.tell(action, decode_layout(self._bytes(header.layout_bytes)))
        layout = self._known.get(action)
        if layout is None or payload_bytes(layout) != header.payload_bytes:
            raise TransportError(
                f"{action} on channel {self._channel}: {header.payload_bytes} bytes came, which is "
                "not what their layout says"
            )
        frame = torch.empty(header.payload_bytes, dtype=torch.uint8)
        self._fill(_bytes_of(frame))
        return Message(layout, unpack(layout, frame, 0))

    def _bytes(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, target: memoryview) -> None:
        left = target
        while left:
            count = self.connection.recv_into(left)
            if count == 0:
                raise TransportError(f"rank {self._channel.source} sends nothing more")
            left = left[count:]
