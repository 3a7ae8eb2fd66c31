"""One communicator between threads that behaves as NCCL does: for the strictest tests.

What a rank gives it are units (`ir.communicators`), in one queue per rank. Only units at the head
of their queues move; a message passes when its SEND and its RECV are, in such units, the first on
their way between two ranks that are not over. There are no tags: whatever meets there is
matched, and if the two do not belong together both fail. Two more habits are kept: waiting for
a send lets the caller go on at once, and a receive's buffers, where their layout is known, are
there from the start and hold NaN (all bits set) until the message comes. Waiting for a receive
does hold the caller: its thread computes, and so stands for the stream that waits on a device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.errors import TransportError
from stretto.ir import SENDS, Unit, carried, edge_of
from stretto.runtime.wire.message import Layout, Message, pack, payload_bytes, unpack
from stretto.runtime.wire.transport import Pending


class SendOnStream(Pending):
    """A send on a device's stream: to wait for it orders later work there, and holds no host."""

    def wait(self, timeout_s: float) -> Message | None:
        """Return at once; an error that is known already is raised."""
        return super().wait(timeout_s) if self.is_done else None


@dataclass(slots=True, eq=False)
class _Transfer:
    """A SEND with its message, or a RECV with its buffers if a layout was known when it came."""

    pending: Pending
    message: Message | None = None
    layout: Layout | None = None
    frame: torch.Tensor | None = None


class Communicator:
    """What all ranks of one engine share of a communicator.

    Args:
        name: Printed in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._expected: dict[int, deque[Unit]] = {}
        self._open: dict[int, list[_Transfer]] = {}
        self._queues: dict[int, deque[list[_Transfer]]] = {}
        self._layouts: dict[tuple[str, int, int], Layout] = {}
        self._has_failed = False

    def expect(self, rank: int, unit: Unit) -> None:
        """The transfers of this unit will come next from the rank; several units queue up."""
        with self._lock:
            self._expected.setdefault(rank, deque()).append(unit)

    def add_send(self, pending: Pending, message: Message, *, eager: bool) -> None:
        """A SEND of the rank's next unit; the unit starts with its last transfer."""
        assert not eager, "no send is over before its receive"
        with self._lock:
            self._add(pending.channel.source, _Transfer(pending, message))

    def add_receive(self, pending: Pending) -> None:
        """A RECV of the rank's next unit."""
        with self._lock:
            layout = self._layouts.get(_edge(pending))
            frame = None if layout is None else _frame(layout)
            if layout is not None and frame is not None:
                pending.message = Message(layout, unpack(layout, frame, 0))
            self._add(pending.channel.target, _Transfer(pending, layout=layout, frame=frame))

    def fail(self, error: Callable[[], BaseException]) -> None:
        """All that is not over fails, each with an error of its own; nothing passes any more."""
        with self._lock:
            self._has_failed = True
            units = [*self._open.values(), *(u for queue in self._queues.values() for u in queue)]
            for transfer in (one for unit in units for one in unit):
                if not transfer.pending.is_done:
                    transfer.pending.message = None
                    transfer.pending.fail(error())
            self._open.clear()
            self._queues.clear()

    def _add(self, rank: int, transfer: _Transfer) -> None:
        if self._has_failed:
            return
        expected = self._expected[rank][0]
        unit = self._open.setdefault(rank, [])
        assert expected.actions[len(unit)] == transfer.pending.action, "units are the program's"
        unit.append(transfer)
        if len(unit) == len(expected.actions):
            self._expected[rank].popleft()
            self._queues.setdefault(rank, deque()).append(self._open.pop(rank))
            while self._match():
                pass

    def _match(self) -> bool:
        """Pass on what can pass now; whether anything did."""
        free: dict[tuple[bool, int, int], _Transfer] = {}
        for queue in self._queues.values():
            while queue and all(one.pending.is_done for one in queue[0]):
                queue.popleft()
            for one in queue[0] if queue else ():
                if not one.pending.is_done:
                    source, target, _ = one.pending.channel
                    free.setdefault((one.pending.action.kind in SENDS, source, target), one)
        pairs = [
            (send, free[False, source, target])
            for (is_send, source, target), send in free.items()
            if is_send and (False, source, target) in free
        ]
        for send, receive in pairs:
            self._pass(send, receive)
        return bool(pairs)

    def _pass(self, send: _Transfer, receive: _Transfer) -> None:
        sent, received = send.pending, receive.pending
        message, send.message = send.message, None
        assert message is not None
        if carried(sent.action) != carried(received.action):
            error = TransportError(f"{received.action} met {sent.action} on {self._name}")
            received.message = None
            sent.fail(error)
            received.fail(error)
            return
        frame = receive.frame
        if frame is None or receive.layout != message.layout:
            frame = _frame(message.layout)
        self._layouts[_edge(received)] = message.layout
        pack(message, frame, 0)
        received.message = Message(message.layout, unpack(message.layout, frame, 0))
        now_ns = time.perf_counter_ns()
        received.finish(now_ns)
        sent.finish(now_ns)


def _edge(pending: Pending) -> tuple[str, int, int]:
    return (pending.channel.direction, *edge_of(pending.action))


def _frame(layout: Layout) -> torch.Tensor:
    """Memory for a message, every bit set: NaN in all floating dtypes."""
    return torch.full((payload_bytes(layout),), 255, dtype=torch.uint8)
