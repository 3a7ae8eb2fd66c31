"""Messages between processes over gloo, torch's own path for CPU tensors.

A message is one gloo message: a frame of a 64-byte header and the tensors behind it. The
receiver posts a frame as large as the layout it knows for that edge says. If the layout has
changed, the sender fills the expected frame with a header that says so, and the layout and a
frame of the right size follow; otherwise only frames travel.

The engine's thread never sits in a gloo wait, which nothing can wake: every channel has a thread
that does, and that is left behind where it cannot be woken. Frames are filled inside `send`, so the
sender may change its tensors afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from stretto.errors import TransportError
from stretto.ir import Action, Channel, Schedule
from stretto.runtime.wire.framing import HEADER_BYTES, KnownLayouts, pack_header, read_header
from stretto.runtime.wire.message import (
    ALIGNMENT,
    Layout,
    Message,
    decode_layout,
    encode_layout,
    pack,
    payload_bytes,
    unpack,
)
from stretto.runtime.wire.transport import Pending
from stretto.runtime.wire.worker import Worker, start_thread

Gloo: TypeAlias = Any
"""A `dist.ProcessGroupGloo`; torch's stub of it leaves out the methods it has."""

_TAGS = {"F": 1, "B": 2}
_UNUSED_TAG = 3
_ENDLESS = timedelta(days=7)
"""Limit of gloo's own waits: who waits too long is found out elsewhere, with more to say."""


def make_gloo_group(store: dist.Store, rank: int, num_ranks: int) -> Gloo:
    """A gloo group of our own, met over a store of its own; blocks until all ranks came."""
    return dist.ProcessGroupGloo(store, rank, num_ranks, _ENDLESS)


class GlooTransport:
    """Messages between processes, one thread per channel.

    Args:
        group: A gloo group for this transport alone.
        rank: This rank in it.
        channels: Those that start or end here.
    """

    def __init__(self, group: Gloo, rank: int, channels: Sequence[Channel]) -> None:
        self._group: Gloo | None = group
        self._metadata_count = 0
        self._senders = {
            channel: _Sender(group, channel) for channel in channels if channel.source == rank
        }
        self._receivers = {
            channel: _Receiver(group, channel) for channel in channels if channel.target == rank
        }

    def begin(self, program: Schedule) -> None:
        """Channels are streams of their own, so nothing is to be known beforehand."""

    def send(self, channel: Channel, action: Action, message: Message) -> Pending:
        """Fill the frame and hand it to the channel's thread."""
        message.check_unchanged()
        pending, is_new = self._senders[channel].send(action, message)
        self._metadata_count += is_new
        return pending

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Let the channel's thread receive the next message."""
        pending = Pending(action, channel)
        self._receivers[channel].worker.put(_Posted(pending))
        return pending

    def metadata_count(self) -> int:
        """How many layouts this rank has sent."""
        return self._metadata_count

    def abort(self, error: BaseException) -> None:
        """Fail all transfers, from any thread, and break the group's connections."""
        ends = (*self._senders.values(), *self._receivers.values())
        for end in ends:
            end.worker.fail(error)
        if self._group is not None and ends:
            peers = {end.peer for end in ends}
            start_thread("poison", partial(_poison, self._group, peers))
        self.close()

    def close(self) -> None:
        """Stop the threads once they are idle; the group's sockets close with its last user."""
        for end in (*self._senders.values(), *self._receivers.values()):
            end.worker.stop()
        self._group = None


def _poison(group: Gloo, peers: set[int]) -> None:
    """Close the group's connections, which wakes waits on them: a wait that ends in vain does.

    A transfer that is half through is not woken; its thread stays behind until the process ends.
    """
    for peer in peers:
        with suppress(RuntimeError):
            frame = torch.empty(1, dtype=torch.uint8)
            group.recv([frame], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


@dataclass(slots=True)
class _Parcel:
    """What goes out for one message, in order, and whom to tell."""

    frames: list[torch.Tensor]
    pending: Pending


@dataclass(slots=True)
class _Posted:
    pending: Pending


class _Sender:
    def __init__(self, group: Gloo, channel: Channel) -> None:
        self._channel = channel
        self._known = KnownLayouts()
        self.peer, tag = channel.target, _TAGS[channel.direction]

        def work(job: _Parcel) -> None:
            while job.frames:  # each is let go as soon as it has left
                group.send([job.frames.pop(0)], channel.target, tag).wait()
            job.pending.finish(time.perf_counter_ns())

        self.worker: Worker[_Parcel] = Worker(f"send-{channel}", work)

    def send(self, action: Action, message: Message) -> tuple[Pending, bool]:
        layout = message.layout
        pending = Pending(action, self._channel)
        expected = self._known.get(action)
        is_new = self._known.tell(action, layout)
        frame = _frame(action, layout)
        pack(message, frame, ALIGNMENT)
        frames = [frame]
        if is_new:
            told = torch.frombuffer(bytearray(encode_layout(layout)), dtype=torch.uint8)
            frames = [_frame(action, expected, layout_bytes=told.numel()), told, frame]
        self.worker.put(_Parcel(frames, pending))
        return pending, is_new


def _frame(action: Action, layout: Layout | None, *, layout_bytes: int = 0) -> torch.Tensor:
    """A frame with its header: of a message, or as large as one and saying what follows."""
    size = 0 if layout is None else payload_bytes(layout)
    frame = torch.empty(ALIGNMENT + size, dtype=torch.uint8)
    header = pack_header(action, layout_bytes, size)
    frame[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return frame


class _Receiver:
    def __init__(self, group: Gloo, channel: Channel) -> None:
        self._channel = channel
        self._known = KnownLayouts()
        self.peer, tag = channel.source, _TAGS[channel.direction]

        def receive(size: int) -> torch.Tensor:
            frame = torch.empty(size, dtype=torch.uint8)
            group.recv([frame], channel.source, tag).wait()
            return frame

        def work(job: _Posted) -> None:
            # nothing of the message is held here any more when its receiver wakes
            job.pending.message = self._message(job.pending.action, receive)
            job.pending.finish(time.perf_counter_ns())

        self.worker: Worker[_Posted] = Worker(f"receive-{channel}", work)

    def _message(self, action: Action, receive: Any) -> Message:
        frame = receive(self._expected_bytes(action))
        header = read_header(frame[:HEADER_BYTES].numpy().tobytes(), action, self._channel)
        if header.layout_bytes:
            layout = decode_layout(receive(header.layout_bytes).numpy().tobytes())
            self._known.tell(action, layout)
            frame = receive(self._expected_bytes(action))
            read_header(frame[:HEADER_BYTES].numpy().tobytes(), action, self._channel)
        layout = self._known.get(action)
        if layout is None:
            raise TransportError(f"{action} on channel {self._channel} got no layout")
        return Message(layout, unpack(layout, frame, ALIGNMENT))

    def _expected_bytes(self, action: Action) -> int:
        layout = self._known.get(action)
        return ALIGNMENT + (0 if layout is None else payload_bytes(layout))
