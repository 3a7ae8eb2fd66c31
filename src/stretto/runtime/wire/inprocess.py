"""Ranks as threads of one process: for tests, notebooks and several stages on one device.

The hub can keep each of the rules under which schedules are proved: `buffered` (a send is over at
once), `rendezvous` (it is over when it heads its channel and so does a posted receive), `blocking`
(the sender sits in the call until then) and `nccl` (units in a queue per communicator, see
`wire.communicator`). Messages are copied at the send, as on any wire, so a sender may change its
tensors afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from stretto.errors import ExecutionError, InputError, RemoteError, TransportError
from stretto.ir import (
    Action,
    Channel,
    Communicators,
    Schedule,
    channel_of,
    communicator_of,
    edge_of,
    read_communicators,
    units,
)
from stretto.runtime.wire.communicator import Communicator, SendOnStream
from stretto.runtime.wire.message import Message, snapshot
from stretto.runtime.wire.transport import Pending

RULES = ("buffered", "rendezvous", "blocking", "nccl")


class InProcessHub:
    """What the threads of a pipeline share; give `hub.group(rank)` to each rank's engine.

    Args:
        num_ranks: Number of ranks (threads).
        rule: `buffered`, `rendezvous`, `blocking` or `nccl`.
        timeout_s: How long a rank waits for another, in seconds.
        communicators: Under `nccl`, which channels share a communicator.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        rule: str = "buffered",
        timeout_s: float = 300,
        communicators: Communicators | str = Communicators.PER_DIRECTION,
    ) -> None:
        if num_ranks < 1:
            raise InputError(f"num_ranks is {num_ranks}; it must be at least 1")
        if rule not in RULES:
            raise InputError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
        self.num_ranks = num_ranks
        self.rule = rule
        self.timeout_s = timeout_s
        sharing = read_communicators(communicators)
        self.communicators = sharing if rule == "nccl" else None
        """How channels share communicators; None if each is a stream of its own."""
        self.failure: tuple[int, str] | None = None
        """The rank that failed first, and what its error said; the error would hold its frames."""
        self._lock = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._left: Counter[int] = Counter()
        self._entered = [0] * num_ranks
        self._engines = [0] * num_ranks
        self._streams: dict[tuple[int, Channel | str], _Stream | Communicator] = {}

    def group(self, rank: int) -> InProcessGroup:
        """This rank's view of the pipeline."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"rank {rank} is not in 0..{self.num_ranks - 1}")
        return InProcessGroup(self, rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """Wake every rank that waits: this rank has failed."""
        with self._lock:
            if self.failure is None:
                self.failure = (rank, str(error))
            self._lock.notify_all()
            streams = list(self._streams.values())
        for stream in streams:
            stream.fail(self.remote_error())

    def remote_error(self) -> ExecutionError:
        """The error other ranks raise for the failure."""
        assert self.failure is not None
        rank, text = self.failure
        return RemoteError(f"rank {rank} failed: {text}", rank=rank)

    def gather(self, rank: int, payload: bytes) -> list[bytes]:
        """Exchange payloads; the n-th call of every rank belongs together."""
        with self._lock:
            index = self._entered[rank]
            self._entered[rank] += 1
            here = self._rounds.setdefault(index, {})
            here[rank] = payload
            self._lock.notify_all()
            arrived = self._lock.wait_for(
                lambda: len(here) == self.num_ranks or self.failure is not None, self.timeout_s
            )
            if len(here) == self.num_ranks:
                self._left[index] += 1
                if self._left[index] == self.num_ranks:
                    del self._rounds[index], self._left[index]
                return [here[other] for other in range(self.num_ranks)]
            if self.failure is not None:
                raise self.remote_error()
            assert not arrived
            late = sorted(set(range(self.num_ranks)) - set(here))
            raise TransportError(f"ranks {late} did not join within {self.timeout_s:g} s")

    def next_engine(self, rank: int) -> int:
        """Number the engines of a rank, so that each has streams of its own."""
        with self._lock:
            self._engines[rank] += 1
            return self._engines[rank]

    def stream(self, number: int, channel: Channel) -> _Stream | Communicator:
        """The stream of a channel, or its communicator, for the n-th engine of the ranks."""
        with self._lock:
            if self.communicators is None:
                return self._streams.setdefault((number, channel), _Stream())
            name = communicator_of(channel, self.communicators)
            return self._streams.setdefault((number, name), Communicator(name))


class InProcessGroup:
    """One thread's place in a pipeline of threads."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.communicators = hub.communicators

    def connect(self, channels: Sequence[Channel]) -> InProcessTransport:
        """Streams of their own for every engine, in the order the engines are made."""
        number = self.hub.next_engine(self.rank)
        streams = {channel: self.hub.stream(number, channel) for channel in channels}
        return InProcessTransport(streams, self.hub, self.rank)

    def gather(self, payload: bytes) -> list[bytes]:
        """Exchange a few bytes with the other threads."""
        return self.hub.gather(self.rank, payload)

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        """What the source thread gives."""
        return self.hub.gather(self.rank, payload or b"")[source]

    def abort(self, error: BaseException) -> None:
        """Wake the other threads with this reason."""
        self.hub.fail(self.rank, error)

    def close(self) -> None:
        """The hub belongs to the user."""


class InProcessTransport:
    """Messages between threads."""

    def __init__(
        self, streams: dict[Channel, _Stream | Communicator], hub: InProcessHub, rank: int
    ) -> None:
        self._streams = streams
        self._hub = hub
        self._rank = rank
        self._last_layout: dict[tuple[str, int, int], object] = {}
        self._metadata_count = 0

    def begin(self, program: Schedule) -> None:
        """Under `nccl`, tell the communicators in which units this rank's transfers will come."""
        if self._hub.communicators is None:
            return
        for unit in units(program, self._rank, self._hub.communicators):
            stream = self._streams[channel_of(unit.actions[0], program)]
            assert isinstance(stream, Communicator)
            stream.expect(self._rank, unit)

    def send(self, channel: Channel, action: Action, message: Message) -> Pending:
        """Copy the message and put it on the channel; under `blocking`, wait for its receiver."""
        edge = (channel.direction, *edge_of(action))
        if self._last_layout.get(edge) != message.layout:
            self._last_layout[edge] = message.layout
            self._metadata_count += 1
        message.check_unchanged()
        copied = Message(message.layout, tuple(snapshot(tensor) for tensor in message.tensors))
        is_on_stream = self._hub.communicators is not None
        pending = SendOnStream(action, channel) if is_on_stream else Pending(action, channel)
        self._streams[channel].add_send(pending, copied, eager=self._hub.rule == "buffered")
        if self._hub.failure is not None:
            pending.fail(self._hub.remote_error())
        if self._hub.rule == "blocking":
            pending.wait(self._hub.timeout_s)
        return pending

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Post a receive."""
        pending = Pending(action, channel)
        self._streams[channel].add_receive(pending)
        if self._hub.failure is not None and not pending.is_done:
            pending.fail(self._hub.remote_error())
        return pending

    def metadata_count(self) -> int:
        """How many layouts would have travelled on a real wire."""
        return self._metadata_count

    def close(self) -> None:
        """Transfers under way fail; those of communicators are other ranks', too, and go on."""
        for stream in self._streams.values():
            if isinstance(stream, _Stream):
                stream.fail(TransportError("the engine was closed"))


class _Stream:
    """One channel: sends and receives matched first to first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: deque[tuple[Pending, Message]] = deque()
        self._receives: deque[Pending] = deque()

    def add_send(self, pending: Pending, message: Message, *, eager: bool) -> None:
        with self._lock:
            self._sends.append((pending, message))
            if eager:
                pending.finish(time.perf_counter_ns())
            self._match()

    def add_receive(self, pending: Pending) -> None:
        with self._lock:
            self._receives.append(pending)
            self._match()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            for pending, _ in self._sends:
                if not pending.is_done:
                    pending.fail(error)
            for pending in self._receives:
                pending.fail(error)
            self._sends.clear()
            self._receives.clear()

    def _match(self) -> None:
        while self._sends and self._receives:
            sending, message = self._sends.popleft()
            receiving = self._receives.popleft()
            now_ns = time.perf_counter_ns()
            receiving.message = message
            del message
            receiving.finish(now_ns)
            if not sending.is_done:
                sending.finish(now_ns)
