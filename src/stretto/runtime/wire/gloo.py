"""Ranks as processes over `torch.distributed` with gloo.

A message is one gloo message: a frame of a 64-byte header and the tensors behind it. The
receiver posts a frame as large as the layout it knows for that edge says. If the layout has
changed, the sender fills the expected frame with a header that says so, and the layout and a
frame of the right size follow; otherwise only frames travel.

The engine's thread never sits in a gloo wait, which nothing can wake: every channel has a thread
that does. Frames are filled inside `send`, so the sender may change its tensors afterwards. All
traffic runs in a group of our own, so messages of the user's are never confused with ours.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from stretto.errors import InputError, TransportError
from stretto.ir import Action, Channel, Schedule, edge_of
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

_Gloo: TypeAlias = Any
"""A `dist.ProcessGroupGloo`; torch's stub of it leaves out the methods it has."""

_HEADER = struct.Struct("<4sIIIQ")  # magic, from stage, to stage, microbatch, bytes of a layout
_MAGIC = b"strt"
_TAGS = {"F": 1, "B": 2}
_SLOT_BYTES = 1024
_LENGTH = struct.Struct("<Q")


class GlooGroup:
    """The ranks of a process group, talking over a gloo group made for one engine.

    Args:
        process_group: The user's group; its ranks in order are the ranks of the pipeline.
        timeout_s: How long a transfer may take, in seconds.
    """

    communicators = None  # a channel has a tag, so each is a stream of its own

    def __init__(self, process_group: dist.ProcessGroup, *, timeout_s: float) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        if dist.get_rank() not in ranks:
            raise InputError(
                f"global rank {dist.get_rank()} is not in the pipeline's group {ranks}"
            )
        self.rank = ranks.index(dist.get_rank())
        self.num_ranks = len(ranks)
        self._group: _Gloo | None = _make_group(ranks, self.rank, timeout_s)
        self._transport: GlooTransport | None = None

    def connect(self, channels: Sequence[Channel]) -> GlooTransport:
        """Start one thread per channel that starts or ends here."""
        assert self._group is not None and self._transport is None
        self._transport = GlooTransport(self._group, self.rank, channels)
        return self._transport

    def gather(self, payload: bytes) -> list[bytes]:
        """Exchange a few bytes: one collective, a second one if any payload is long."""
        group = self._require_group()
        blobs = self._gather_slots(group, payload, _SLOT_BYTES)
        longest = max(_LENGTH.unpack_from(blob)[0] for blob in blobs)
        if longest > _SLOT_BYTES - _LENGTH.size:
            blobs = self._gather_slots(group, payload, longest + _LENGTH.size)
        return [blob[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(blob)[0]] for blob in blobs]

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        """What the source rank gives: its length, then its bytes."""
        group = self._require_group()
        length = torch.tensor([0 if payload is None else len(payload)])
        options = dist.BroadcastOptions()
        options.rootRank = source
        try:
            group.broadcast([length], options).wait()
            blob = bytearray(payload) if payload is not None else bytearray(int(length))
            data = torch.frombuffer(blob or bytearray(1), dtype=torch.uint8)
            group.broadcast([data], options).wait()
        except RuntimeError as error:
            raise TransportError(f"rank {source}'s batch did not arrive: {error}") from error
        return bytes(blob)

    def _gather_slots(self, group: _Gloo, payload: bytes, size: int) -> list[bytes]:
        room = payload[: size - _LENGTH.size]
        blob = bytearray(_LENGTH.pack(len(payload)) + room).ljust(size, b"\0")
        mine = torch.frombuffer(blob, dtype=torch.uint8)
        everyone = [torch.empty(size, dtype=torch.uint8) for _ in range(self.num_ranks)]
        try:
            group.allgather([everyone], [mine]).wait()
        except RuntimeError as error:
            raise TransportError(f"the ranks could not exchange their state: {error}") from error
        return [one.numpy().tobytes() for one in everyone]

    def _require_group(self) -> _Gloo:
        if self._group is None:
            raise TransportError("the pipeline's group is closed")
        return self._group

    def abort(self, error: BaseException) -> None:
        """Let go of the group: peers that wait for this rank see the connection close."""
        self.close()

    def close(self) -> None:
        """Let go of the group that was made here, and of no other; its sockets close with it."""
        transport, self._transport, self._group = self._transport, None, None
        if transport is not None:
            transport.close()


def _make_group(ranks: Sequence[int], rank: int, timeout_s: float) -> _Gloo:
    """A gloo group for one engine, met over the store of the default group.

    Every engine of the same ranks meets under a number of its own. (`dist.new_group` with local
    synchronisation takes the name of a destroyed group again, and then finds its old addresses.)
    """
    store = dist.distributed_c10d._get_default_store()
    place = "stretto/" + "-".join(map(str, ranks))
    number = store.add(f"{place}/engines of {rank}", 1)
    own = dist.PrefixStore(f"{place}/{number}", store)
    return dist.ProcessGroupGloo(own, rank, len(ranks), timedelta(seconds=timeout_s))


class GlooTransport:
    """Messages between processes, one thread per channel."""

    def __init__(self, group: _Gloo, rank: int, channels: Sequence[Channel]) -> None:
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
        sender = self._senders[channel]
        pending, is_new = sender.send(action, message)
        self._metadata_count += is_new
        return pending

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Hand a posted receive to the channel's thread."""
        pending = Pending(action, channel)
        self._receivers[channel].jobs.put(pending)
        return pending

    def metadata_count(self) -> int:
        """How many layouts this rank has sent."""
        return self._metadata_count

    def close(self) -> None:
        """Stop the threads once they are idle; a wait without end dies with the process."""
        for worker in (*self._senders.values(), *self._receivers.values()):
            worker.jobs.put(None)


class _Parcel(NamedTuple):
    """What goes out for one message, in order, and whom to tell."""

    frames: list[torch.Tensor]
    pending: Pending


class _Worker:
    """A thread that does the waiting of one channel."""

    def __init__(self, group: _Gloo, channel: Channel, peer: int) -> None:
        self.jobs: queue.SimpleQueue[_Parcel | Pending | None] = queue.SimpleQueue()
        self._group: _Gloo | None = group
        self._channel = channel
        self._peer = peer
        self._tag = _TAGS[channel.direction]
        self._broken: BaseException | None = None
        name = f"stretto-{type(self).__name__.strip('_').lower()}-{channel}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                self._group = None  # the group's sockets close with its last reference
                return
            pending = job if isinstance(job, Pending) else job.pending
            try:
                if self._broken is not None:
                    raise self._broken
                self._work(job)
            except Exception as error:
                self._broken = error.with_traceback(None)  # which holds this frame
                pending.fail(error)
            del job, pending

    def _work(self, job: _Parcel | Pending) -> None:
        raise AssertionError("each direction has its own work")


class _Sender(_Worker):
    def __init__(self, group: _Gloo, channel: Channel) -> None:
        self._known: dict[tuple[int, int], Layout] = {}
        super().__init__(group, channel, channel.target)

    def send(self, action: Action, message: Message) -> tuple[Pending, bool]:
        edge = edge_of(action)
        known = self._known.get(edge)
        is_new = known != message.layout
        pending = Pending(action, self._channel)
        frame = self._frame(action, message.layout, b"")
        pack(message, frame, ALIGNMENT)
        frames = [frame]
        if is_new:
            self._known[edge] = message.layout
            layout_bytes = encode_layout(message.layout)
            announcement = self._frame(action, known, layout_bytes)
            layout = torch.frombuffer(bytearray(layout_bytes), dtype=torch.uint8)
            frames = [announcement, layout, frame]
        self.jobs.put(_Parcel(frames, pending))
        return pending, is_new

    def _frame(self, action: Action, layout: Layout | None, announces: bytes) -> torch.Tensor:
        size = _frame_bytes(layout)
        frame = torch.empty(size, dtype=torch.uint8)
        header = _HEADER.pack(_MAGIC, *edge_of(action), action.microbatch, len(announces))
        frame[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return frame

    def _work(self, job: _Parcel | Pending) -> None:
        assert isinstance(job, _Parcel) and self._group is not None
        while job.frames:  # each is let go as soon as it has left
            self._group.send([job.frames.pop(0)], self._peer, self._tag).wait()
        job.pending.finish(time.perf_counter_ns())


class _Receiver(_Worker):
    def __init__(self, group: _Gloo, channel: Channel) -> None:
        self._known: dict[tuple[int, int], Layout] = {}
        super().__init__(group, channel, channel.source)

    def _work(self, job: _Parcel | Pending) -> None:
        assert isinstance(job, Pending)
        # nothing of the message is held here any more when its receiver wakes
        job.message = self._message(job)
        job.finish(time.perf_counter_ns())

    def _message(self, job: Pending) -> Message:
        edge = edge_of(job.action)
        layout = self._known.get(edge)
        frame = self._receive(_frame_bytes(layout))
        layout_bytes = self._check(frame, job.action)
        if layout_bytes:
            layout = decode_layout(self._receive(layout_bytes).numpy().tobytes())
            self._known[edge] = layout
            frame = self._receive(_frame_bytes(layout))
            self._check(frame, job.action)
        assert layout is not None
        return Message(layout, unpack(layout, frame, ALIGNMENT))

    def _receive(self, size: int) -> torch.Tensor:
        assert self._group is not None
        frame = torch.empty(size, dtype=torch.uint8)
        self._group.recv([frame], self._peer, self._tag).wait()
        return frame

    def _check(self, frame: torch.Tensor, action: Action) -> int:
        """The number of layout bytes that follow; refuses a frame that is not the planned one."""
        header = frame[: _HEADER.size].numpy().tobytes()
        magic, source, target, microbatch, layout_bytes = _HEADER.unpack(header)
        expected = (*edge_of(action), action.microbatch)
        if magic != _MAGIC or (source, target, microbatch) != expected:
            raise TransportError(
                f"{action} on channel {self._channel} got a message from stage {source} to stage "
                f"{target} for microbatch {microbatch}; both ranks must run the same schedule",
                action=str(action),
            )
        return layout_bytes


def _frame_bytes(layout: Layout | None) -> int:
    return ALIGNMENT + (payload_bytes(layout) if layout is not None else 0)
