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
from collections.abc import Callable, Sequence

from stretto.errors import ExecutionError, HangError, InputError, TransportError
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
from stretto.runtime.wire.failure import Cause, cause_of, ends_the_engine
from stretto.runtime.wire.message import Message, snapshot
from stretto.runtime.wire.progress import Progress, hang_report
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
        self._lock = threading.Lock()
        self._rooms: list[Room] = []
        self._engines = [0] * num_ranks
        self._gone: dict[int, Cause] = {}

    def group(self, rank: int) -> InProcessGroup:
        """This rank's view of the pipeline."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"rank {rank} is not in 0..{self.num_ranks - 1}")
        return InProcessGroup(self, rank)

    def join(self, rank: int) -> InProcessMember:
        """A rank's place in its next engine: the n-th engines of all ranks belong together."""
        with self._lock:
            number = self._engines[rank]
            self._engines[rank] += 1
            if number == len(self._rooms):
                self._rooms.append(Room(self))
                for other, cause in self._gone.items():
                    self._rooms[number].leave(other, cause)
            return InProcessMember(self._rooms[number], rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """This rank's thread has ended with an error: wake every rank that waits for it."""
        cause = cause_of(rank, error, is_final=True)
        with self._lock:
            self._gone[rank] = cause
            rooms = list(self._rooms)
        for room in rooms:
            room.leave(rank, cause)


class InProcessGroup:
    """One thread's place in a pipeline of threads; may be given to several engines."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank

    def join(self) -> InProcessMember:
        """A place in the rank's next engine."""
        return self.hub.join(self.rank)


class Room:
    """What the ranks of one engine share.

    Each step that fails ends an epoch of the rank it fails on; failures, exchanges and streams
    belong to one, so that nothing of a failed step reaches a later one.
    """

    def __init__(self, hub: InProcessHub) -> None:
        self.hub = hub
        self.progress = [Progress() for _ in range(hub.num_ranks)]
        self.epochs = [0] * hub.num_ranks
        self._lock = threading.Condition()
        self._entered = [0] * hub.num_ranks
        self._rounds: dict[tuple[int, int], dict[int, bytes]] = {}
        self._served: Counter[tuple[int, int]] = Counter()
        self._failures: dict[int, Cause] = {}
        self._left: dict[int, Cause] = {}
        self._streams: dict[tuple[int, Channel | str], _Stream | Communicator] = {}

    def failure(self, rank: int) -> Cause | None:
        """Why this rank cannot go on with its step, if so."""
        gone = (one for one in self._left.values() if one.is_final)
        return self._failures.get(self.epochs[rank]) or next(gone, None)

    def gather(self, rank: int, payload: bytes, what: str) -> list[bytes]:
        """Exchange payloads; the n-th call of every rank in an epoch belongs together."""
        everyone = range(self.hub.num_ranks)
        with self._lock:
            key = (self.epochs[rank], self._entered[rank])
            self._entered[rank] += 1
            here = self._rounds.setdefault(key, {})
            here[rank] = payload
            self._lock.notify_all()
            self._lock.wait_for(
                lambda: len(here) == len(everyone) or self._why_missing(rank, here) is not None,
                self.hub.timeout_s,
            )
            if len(here) == len(everyone):
                self._served[key] += 1
                if self._served[key] == len(everyone):
                    del self._rounds[key], self._served[key]
                return [here[other] for other in everyone]
            cause = self._why_missing(rank, here)
        if cause is not None:
            raise cause.error()
        late = sorted(set(everyone) - set(here))
        raise HangError(
            f"rank {rank} waited {self.hub.timeout_s:g} s for ranks {late}, which did not come to "
            f"{what}"
        )

    def _why_missing(self, rank: int, here: dict[int, bytes]) -> Cause | None:
        """Why those that are not here will not come, if so; one may leave after it was here."""
        told = self._failures.get(self.epochs[rank])
        left = (cause for other, cause in self._left.items() if other not in here)
        return told or next(left, None)

    def fail(self, rank: int, cause: Cause) -> None:
        """A rank's step has failed: wake all that wait in the same epoch."""
        epoch = self.epochs[rank]
        with self._lock:
            cause = self._failures.setdefault(epoch, cause)
            self._lock.notify_all()
            streams = [one for (when, _), one in self._streams.items() if when == epoch]
        for stream in streams:
            stream.fail(cause.error)

    def next_epoch(self, rank: int) -> None:
        """This rank begins anew; what no rank can reach any more is dropped."""
        with self._lock:
            self.epochs[rank] += 1
            self._entered[rank] = 0
            oldest = min(self.epochs)
            self._streams = {key: one for key, one in self._streams.items() if key[0] >= oldest}
            self._rounds = {key: one for key, one in self._rounds.items() if key[0] >= oldest}

    def leave(self, rank: int, cause: Cause) -> None:
        """Nothing will come from this rank any more; a final cause fails the others' step."""
        with self._lock:
            self._left.setdefault(rank, cause)
            self._lock.notify_all()
            streams = list(self._streams.items())
            if len(self._left) == self.hub.num_ranks:
                self._streams.clear()
        for (_, name), stream in streams:
            if cause.is_final:
                stream.fail(cause.error)
            elif isinstance(stream, _Stream) and isinstance(name, Channel) and rank in name[:2]:
                stream.leave(cause.error)

    def all_here(self) -> bool:
        """Whether no rank has left."""
        return not self._left

    def stream(self, rank: int, channel: Channel) -> _Stream | Communicator:
        """The stream of a channel, or its communicator, in the epoch of this rank."""
        with self._lock:
            epoch = self.epochs[rank]
            if self.hub.communicators is None:
                return self._streams.setdefault((epoch, channel), _Stream())
            name = communicator_of(channel, self.hub.communicators)
            return self._streams.setdefault((epoch, name), Communicator(name))

    def hang_report(self) -> tuple[str, dict[int, str]]:
        """Who holds up the others, and where each rank is."""
        places = {rank: one.place() for rank, one in enumerate(self.progress)}
        for rank, cause in self._left.items():
            places[rank] = places[rank]._replace(text=f"gone: {cause.message}", holds_up=True)
        return hang_report(places), {rank: place.text for rank, place in places.items()}


class InProcessMember:
    """One thread's place in one engine."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank = rank
        self.num_ranks = room.hub.num_ranks
        self.communicators = room.hub.communicators
        self.progress = room.progress[rank]
        self._room = room

    def connect(self, channels: Sequence[Channel]) -> InProcessTransport:
        """Streams of their own for every engine and epoch."""
        streams = {channel: self._room.stream(self.rank, channel) for channel in channels}
        return InProcessTransport(streams, self._room, self.rank)

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """Exchange a few bytes with the other threads."""
        self.progress.at(what)
        self.progress.waits_for("the other ranks")
        answers = self._room.gather(self.rank, payload, what)
        self.progress.waits_no_more()
        return answers

    def broadcast(self, payload: bytes | None, source: int, what: str) -> bytes:
        """What the source thread gives."""
        return self.gather(payload or b"", what)[source]

    def check(self) -> None:
        """Raise if another rank has failed."""
        cause = self._room.failure(self.rank)
        if cause is not None:
            raise cause.error()

    def explain(self, error: TransportError) -> ExecutionError:
        """The failure of another rank, or where all ranks hang."""
        cause = self._room.failure(self.rank)
        if cause is not None:
            return cause.error()
        if not isinstance(error, HangError):
            return error
        text, places = self._room.hang_report()
        return HangError(f"{error}; {text}", report=places, rank=self.rank, action=error.action)

    def fail(self, error: BaseException) -> bool:
        """End the step on all ranks for an error of this one; whether there can be another step."""
        known = self._room.failure(self.rank)
        is_final = ends_the_engine(error) or not self._room.all_here()
        is_final = is_final or (known is not None and known.is_final)
        self._room.fail(self.rank, cause_of(self.rank, error, is_final=is_final))
        if not is_final:
            self._room.next_epoch(self.rank)
        return not is_final

    def close(self, reason: str) -> None:
        """Others that wait for this rank are told; the hub belongs to the user."""
        message = f"rank {self.rank} has closed its engine: {reason}"
        self._room.leave(self.rank, Cause(rank=self.rank, message=message, has_left=True))


class InProcessTransport:
    """Messages between threads."""

    def __init__(
        self, streams: dict[Channel, _Stream | Communicator], room: Room, rank: int
    ) -> None:
        self._streams = streams
        self._room = room
        self._hub = room.hub
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
        self._fail_late(pending)
        if self._hub.rule == "blocking":
            pending.wait(self._hub.timeout_s)
        return pending

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Post a receive."""
        pending = Pending(action, channel)
        self._streams[channel].add_receive(pending)
        self._fail_late(pending)
        return pending

    def _fail_late(self, pending: Pending) -> None:
        """A transfer that came after the failure that it should have failed with."""
        cause = self._room.failure(self._rank)
        if cause is not None and not pending.is_done:
            pending.fail(cause.error())

    def metadata_count(self) -> int:
        """How many layouts would have travelled on a real wire."""
        return self._metadata_count

    def close(self) -> None:
        """Nothing: what was sent still arrives, and the room tells who has left."""


class _Stream:
    """One channel: sends and receives matched first to first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: deque[tuple[Pending, Message]] = deque()
        self._receives: deque[Pending] = deque()
        self._left: Callable[[], BaseException] | None = None

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

    def fail(self, error: Callable[[], BaseException]) -> None:
        """All that is not over fails, each with an error of its own."""
        with self._lock:
            for pending, _ in self._sends:
                if not pending.is_done:
                    pending.fail(error())
            for pending in self._receives:
                pending.fail(error())
            self._sends.clear()
            self._receives.clear()

    def leave(self, error: Callable[[], BaseException]) -> None:
        """One end has left: what it sent is still there, what waits for it fails."""
        with self._lock:
            self._left = error
            self._match()

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
        if self._left is not None:
            waiting = [*self._receives, *(one for one, _ in self._sends if not one.is_done)]
            for pending in waiting:
                pending.fail(self._left())
            self._receives.clear()
