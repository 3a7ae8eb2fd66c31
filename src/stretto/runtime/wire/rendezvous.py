"""How the processes of one engine find each other: through the store of `torch.distributed`.

Every rank says in the store on which host it is and what it was asked for; then where it listens.
Ranks of one host meet over unix sockets without a name in the file system, so nothing is left
behind, whatever ends them; ranks of several hosts over TCP. A token from the store keeps strangers
out. Connections are not inherited by processes that a rank forks (a data loader's, for example):
with a copy of a socket they would keep a dead rank's connections open.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from stretto.errors import TransportError

BUFFER_BYTES = 1 << 20
"""Of each socket, each way: large messages then move in few pieces."""

_BACKLOG = 1024
_HELLO_LIMIT_S = 5.0
_MAX_HELLO_BYTES = 1 << 16
_POLL_S = 0.05
_LENGTH = struct.Struct("<I")

_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in list(_OPEN):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class Meeting:
    """One rank's place among the processes of an engine.

    Args:
        store: A `torch.distributed` store for this engine alone.
        rank: This rank within the pipeline.
        num_ranks: Number of ranks.
        wish: What this rank was asked for (JSON); `wishes` holds those of all ranks.
        timeout_s: How long ranks wait for each other, in seconds.

    Raises:
        TransportError: ranks did not come in time; names them.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, wish: Any, *, timeout_s: float):
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        note = {"host": _host_identity(), "address": _address_facing(_store_host(store))}
        note |= {"wish": wish, "token": secrets.token_hex(16) if rank == 0 else None}
        notes = self._exchange(store, "host", note)
        self.wishes: list[Any] = [one["wish"] for one in notes]
        self.is_one_host = len({one["host"] for one in notes}) == 1
        self._token = str(notes[0]["token"])
        self._listener = self._listen(notes)
        self._places = self._exchange(store, "place", _place_of(self._listener))

    def _exchange(self, store: Any, what: str, mine: Any) -> list[Any]:
        store.set(f"{what}/{self.rank}", json.dumps(mine))
        missing = set(range(self.num_ranks))
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.001
        while missing:
            missing -= {rank for rank in missing if store.check([f"{what}/{rank}"])}
            if missing and time.monotonic() > deadline:
                raise TransportError(
                    f"rank {self.rank}: ranks {sorted(missing)} did not come to make the engine "
                    f"within {self._timeout_s:g} s; every rank of the group must make it"
                )
            if missing:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
        return [json.loads(store.get(f"{what}/{rank}")) for rank in range(self.num_ranks)]

    def _listen(self, notes: Sequence[Mapping[str, Any]]) -> socket.socket:
        if self.is_one_host and sys.platform == "linux":
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0stretto-{secrets.token_hex(16)}")
        elif self.is_one_host:
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            address = notes[self.rank]["address"]
            if _is_loopback(address):  # the store is on this host: others tell where they are
                others = [one["address"] for one in notes if not _is_loopback(one["address"])]
                address = _address_facing(others[0] if others else None)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family)
        listener.listen(_BACKLOG)
        _OPEN.add(listener)
        return listener

    def dial(self, rank: int, purpose: Any) -> socket.socket:
        """Connect to a rank and say what for (JSON).

        Raises:
            TransportError: it cannot be reached.
        """
        family, address = self._places[rank]
        connection = _sized(socket.socket(socket.AddressFamily(family), socket.SOCK_STREAM))
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(tuple(address) if isinstance(address, list) else f"\0{address}")
            hello = json.dumps([self._token, self.rank, purpose]).encode()
            connection.sendall(_LENGTH.pack(len(hello)) + hello)
        except OSError as error:
            connection.close()
            raise TransportError(f"rank {self.rank} cannot reach rank {rank}: {error}") from error
        connection.settimeout(None)
        return connection

    def accept(
        self, wanted: Collection[tuple[int, Any]], *, watched: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Any, socket.socket]]:
        """Take connections of other ranks as they come: rank, purpose, connection.

        Args:
            wanted: Rank and purpose (as JSON gives it back) of each; others are closed.
            watched: Called now and then while waiting; raises to give up.

        Raises:
            TransportError: some did not come in time; names their ranks.
        """
        missing = list(wanted)
        deadline = time.monotonic() + self._timeout_s
        self._listener.settimeout(_POLL_S)
        while missing:
            watched()
            if time.monotonic() > deadline:
                ranks = sorted({rank for rank, _ in missing})
                raise TransportError(
                    f"rank {self.rank}: ranks {ranks} did not connect within {self._timeout_s:g} s"
                )
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            hello = self._hello(_sized(connection))
            if hello in missing:
                missing.remove(hello)
                yield (*hello, connection)
            else:
                connection.close()

    def _hello(self, connection: socket.socket) -> tuple[int, Any] | None:
        """What a connection says of itself; None if it is a stranger's."""
        connection.settimeout(_HELLO_LIMIT_S)
        with suppress(OSError, ValueError, TypeError):
            (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
            if length <= _MAX_HELLO_BYTES:
                token, rank, purpose = json.loads(_exactly(connection, length))
                if secrets.compare_digest(str(token), self._token):
                    connection.settimeout(None)
                    return int(rank), purpose
        return None

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def _sized(connection: socket.socket) -> socket.socket:
    _OPEN.add(connection)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    blob = b""
    while len(blob) < size:
        piece = connection.recv(size - len(blob))
        if not piece:
            raise OSError("the connection was closed")
        blob += piece
    return blob


def _place_of(listener: socket.socket) -> tuple[int, Any]:
    """Family and address, as JSON holds them."""
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return int(listener.family), address[1:].decode()
    return int(listener.family), list(address)


def _host_identity() -> str:
    """Equal for two processes that can meet over unix sockets without a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


def _store_host(store: Any) -> str | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _address_facing(host: str | None) -> str:
    """The address from which this machine would reach another; nothing is sent."""
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host or platform.node(), 9)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
