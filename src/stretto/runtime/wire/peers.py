"""The processes of one engine: how they meet, talk beside the data, and fail together.

Whatever carries the messages, ranks meet over the store of `torch.distributed` and keep a control
connection to each other. A step that fails ends an epoch: the transport is given up with all that
was on its way, and the next step makes another.
"""

from __future__ import annotations

import atexit
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from stretto.errors import ExecutionError, HangError, InputError, TransportError
from stretto.ir import Channel
from stretto.runtime.wire.control import Control
from stretto.runtime.wire.failure import Cause, cause_of, ends_the_engine
from stretto.runtime.wire.gloo import GlooTransport, make_gloo_group
from stretto.runtime.wire.progress import Progress, hang_report
from stretto.runtime.wire.rendezvous import Meeting
from stretto.runtime.wire.sockets import SocketTransport
from stretto.runtime.wire.worker import start_thread

TRANSPORTS = ("auto", "sockets", "gloo")

_NEWS_S = 1.0
"""How long after a broken transfer to wait for the news of what broke it."""
_POLL_S = 0.05

_OPEN: weakref.WeakSet[PeerGroup] = weakref.WeakSet()


class PeerGroup:
    """The ranks of a process group, seen from one of them, for one engine.

    Args:
        process_group: The user's group; its ranks in order are the ranks of the pipeline.
        transport: What carries the messages: `sockets`, `gloo`, or `auto`.
        on_cpu: Whether this rank's stages are on the CPU.
        timeout_s: How long ranks wait for each other, in seconds.

    Raises:
        InputError: this process is not in the group, or ranks ask for different transports.
        TransportError: ranks did not come in time; names them.
    """

    communicators = None  # every channel is a stream of its own

    def __init__(
        self, process_group: dist.ProcessGroup, *, transport: str, on_cpu: bool, timeout_s: float
    ) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        if dist.get_rank() not in ranks:
            raise InputError(
                f"global rank {dist.get_rank()} is not in the pipeline's group {ranks}"
            )
        self.rank = ranks.index(dist.get_rank())
        self.num_ranks = len(ranks)
        self.progress = Progress()
        self._timeout_s = timeout_s
        self._transport: SocketTransport | GlooTransport | None = None
        self._is_closed = False
        self._cause: Cause | None = None
        """The failure that ends the engine, once there is one."""
        self._store = _store_for_one_engine(ranks, self.rank)
        wish = {"transport": transport, "on_cpu": on_cpu}
        self._meeting = Meeting(self._store, self.rank, self.num_ranks, wish, timeout_s=timeout_s)
        try:
            self.transport_name = _agreed_transport(self._meeting)
            connections = self._meet_all()
        except BaseException:
            self._meeting.close()
            raise
        self._control = Control(
            self.rank,
            connections,
            describe=self.progress.place,
            on_failure=lambda cause: self._abort(cause.error()),
        )
        _OPEN.add(self)

    def _meet_all(self) -> dict[int, socket.socket]:
        """A connection to every other rank; the higher one dials."""
        connections: dict[int, socket.socket] = {}
        try:
            for other in range(self.rank):
                connections[other] = self._meeting.dial(other, "control")
            higher = [(other, "control") for other in range(self.rank + 1, self.num_ranks)]
            for other, _, connection in self._meeting.accept(higher):
                connections[other] = connection
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        return connections

    def connect(self, channels: Sequence[Channel]) -> SocketTransport | GlooTransport:
        """Make the transport of this epoch; called on every rank."""
        assert self._transport is None
        self.progress.at("the making of the connections")
        self.progress.waits_for("the other ranks")
        if self.transport_name == "sockets":
            self._transport = self._connect_sockets(channels)
        else:
            self._transport = self._connect_gloo(channels)
        self.progress.waits_no_more()
        self.check()
        return self._transport

    def _connect_sockets(self, channels: Sequence[Channel]) -> SocketTransport:
        outgoing: dict[Channel, socket.socket] = {}
        incoming: dict[Channel, socket.socket] = {}
        try:
            for channel in channels:
                if channel.source == self.rank:
                    outgoing[channel] = self._meeting.dial(channel.target, self._purpose(channel))
            wanted = {
                channel: (channel.source, self._purpose(channel))
                for channel in channels
                if channel.target == self.rank
            }
            for *hello, connection in self._meeting.accept(wanted.values(), watched=self.check):
                channel = next(one for one in wanted if wanted[one] == tuple(hello))
                incoming[channel] = connection
        except BaseException:
            for connection in (*outgoing.values(), *incoming.values()):
                connection.close()
            raise
        return SocketTransport(outgoing, incoming)

    def _purpose(self, channel: Channel) -> list[Any]:
        return ["data", self._control.epoch, *channel]

    def _connect_gloo(self, channels: Sequence[Channel]) -> GlooTransport:
        """Gloo meets in a thread of its own, which nothing can wake: this one goes on watching."""
        made: list[Any] = []
        store = dist.PrefixStore(f"gloo/{self._control.epoch}", self._store)

        def make() -> None:
            try:
                made.append(make_gloo_group(store, self.rank, self.num_ranks))
            except RuntimeError as error:
                made.append(TransportError(f"gloo could not connect: {error}"))

        thread = start_thread("gloo", make)
        left_s = self._timeout_s
        while not made:
            thread.join(_POLL_S)
            self.check()
            left_s -= _POLL_S
            if left_s < 0 and not made:
                raise HangError(f"gloo did not connect the ranks within {self._timeout_s:g} s")
        if isinstance(made[0], TransportError):
            raise made[0]
        return GlooTransport(made[0], self.rank, channels)

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """Exchange a few bytes: every rank gets every rank's, in rank order."""
        return self._exchange(payload, range(self.num_ranks), what)

    def broadcast(self, payload: bytes | None, source: int, what: str) -> bytes:
        """Every rank gets what the source rank gives; the others give None."""
        return self._exchange(payload, [source], what)[0]

    def _exchange(self, payload: bytes | None, sources: Sequence[int], what: str) -> list[bytes]:
        self.progress.at(what)
        self.progress.waits_for("the other ranks")
        answers = self._control.exchange(payload, sources, what=what, timeout_s=self._timeout_s)
        self.progress.waits_no_more()
        return answers

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self._control.failure is not None:
            raise self._control.failure.error()

    def explain(self, error: TransportError) -> ExecutionError:
        """The error to raise instead: with the rank that broke off, or where all ranks hang."""
        if not isinstance(error, HangError):
            cause = self._control.cause_within(_NEWS_S)
            return error if cause is None else cause.error()
        places = self._control.ask_all()
        if self._control.failure is not None:
            return self._control.failure.error()
        return HangError(
            f"{error}; {hang_report(places)}",
            report={rank: place.text for rank, place in places.items()},
            rank=self.rank,
            action=error.action,
        )

    def fail(self, error: BaseException) -> bool:
        """End the step on all ranks for an error of this one; whether there can be another step."""
        known: Cause | None = self._control.failure
        is_final = ends_the_engine(error) or not self._control.all_here
        is_final = is_final or (known is not None and known.is_final)
        told = cause_of(self.rank, error, is_final=is_final)
        if known is None:
            self._control.tell_failure(told)
        if is_final:
            self._cause = known or told
        self._abort(told.error())
        if not is_final:
            self._control.next_epoch()
            self.progress.at("the code after a step that failed")
        return not is_final

    def _abort(self, error: BaseException) -> None:
        """Give up the transport, from any thread."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort(error)

    def close(self, reason: str) -> None:
        """Let go of all that was made here, and tell the others that it was meant."""
        if self._is_closed:
            return
        self._is_closed = True
        _OPEN.discard(self)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        self._control.close(reason, self._cause)
        self._meeting.close()


@atexit.register
def _say_farewell() -> None:
    for group in list(_OPEN):
        group.close("its program has ended")


def _store_for_one_engine(ranks: Sequence[int], rank: int) -> dist.Store:
    """A part of the default group's store; the n-th engines of the same ranks meet in the n-th."""
    store = dist.distributed_c10d._get_default_store()
    place = "stretto/" + "-".join(map(str, ranks))
    number = store.add(f"{place}/engines of {rank}", 1)
    return dist.PrefixStore(f"{place}/{number}", store)


def _agreed_transport(meeting: Meeting) -> str:
    asked = [wish["transport"] for wish in meeting.wishes]
    if any(one != asked[0] for one in asked):
        told = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(asked))
        raise InputError(f"the ranks do not agree on the transport ({told}); give all the same")
    if asked[0] != "auto":
        return asked[0]
    is_local = meeting.is_one_host and all(wish["on_cpu"] for wish in meeting.wishes)
    return "sockets" if is_local else "gloo"
