"""Every rank connected to every other, beside the data, from the engine's start to its end.

Over these connections ranks exchange their notes before a step, tell each other at once when one
fails, and answer where they are when one asks. A connection that ends without a farewell is a
process that died. One thread per rank reads; it never computes, so what it says is in time.

Each step that fails ends an epoch. Frames of an earlier epoch are late and are dropped, those of a
later one are kept until this rank gets there.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TypeAlias

from stretto.errors import HangError, RemoteError, TransportError
from stretto.runtime.wire.failure import Cause
from stretto.runtime.wire.progress import Place

_HEADER = struct.Struct("<4sBIQQ")  # magic, kind, epoch, number, bytes that follow
_MAGIC = b"strc"
_NOTE, _FAILURE, _ASK, _ANSWER, _FAREWELL = range(5)
_Frame: TypeAlias = tuple[int, int, int, bytes]
"""Kind, epoch, number and what it says."""
_URGENT_S = 1.0
"""How long to try to tell a rank something that must not hold up this one."""


class Control:
    """One rank's connections to all others.

    Args:
        rank: This rank.
        connections: Rank → connection, for all others; owned from now on.
        describe: Says where this rank is; called by the reading thread.
        on_failure: Called once per epoch, by the reading thread, when another rank failed.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        describe: Callable[[], Place],
        on_failure: Callable[[Cause], None],
    ) -> None:
        self.rank = rank
        self.epoch = 0
        self.failure: Cause | None = None
        """The first failure of another rank in this epoch, or the death of one."""
        self._describe = describe
        self._on_failure = on_failure
        self._peers = {other: _Peer(other, one) for other, one in connections.items()}
        self._changed = threading.Condition()
        self._number = 0
        self._notes: dict[tuple[int, int], dict[int, bytes]] = {}
        self._early: dict[int, Cause] = {}
        self._answers: dict[int, dict[int, Place]] = {}
        self._questions = 0
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._read, name="stretto-control", daemon=True)
        self._thread.start()

    def exchange(
        self, payload: bytes | None, sources: Sequence[int], *, what: str, timeout_s: float
    ) -> list[bytes]:
        """The notes of some ranks: all ranks call this in the same order with the same sources.

        Args:
            payload: This rank's note, if it is one of the sources.
            sources: The ranks whose notes are wanted.
            what: What the notes are about, for the error.
            timeout_s: How long to wait for them.

        Raises:
            RemoteError: another rank failed meanwhile, or one whose note is missing has left.
            HangError: notes did not come in time; names the ranks.
        """
        key = (self.epoch, self._number)
        self._number += 1
        others = {one for one in sources if one != self.rank}
        if self.rank in sources:
            assert payload is not None
            for peer in self._peers.values():
                self._tell(peer, _NOTE, payload, number=key[1], within_s=timeout_s)
        with self._changed:
            notes = self._notes.setdefault(key, {})
            self._changed.wait_for(
                lambda: others <= notes.keys() or self._why_missing(others - notes.keys()),
                timeout_s,
            )
            del self._notes[key]
            missing = others - notes.keys()
            why = self._why_missing(missing)
        # a rank that was away finds all notes, and beside them that the others have given up
        if not missing and why is None:
            notes[self.rank] = payload or b""
            return [notes[one] for one in sources]
        if why is not None:
            raise why.error()
        raise HangError(
            f"rank {self.rank} waited {timeout_s:g} s for ranks {sorted(missing)}, which did not "
            f"come to {what}"
        )

    def _why_missing(self, ranks: set[int]) -> Cause | None:
        """Why notes of these ranks will not come, if so; a rank may leave after it gave its own."""
        if self.failure is not None and not self.failure.has_left:
            return self.failure
        return next((peer.left for rank in ranks if (peer := self._peers[rank]).left), None)

    def tell_failure(self, cause: Cause) -> None:
        """Tell all others that this rank's step has failed; never waits long for any of them."""
        self._tell_all(_FAILURE, json.dumps(asdict(cause)).encode())

    def next_epoch(self) -> None:
        """Begin anew after a step that failed; a rank that has died stays a failure."""
        with self._changed:
            self.epoch += 1
            self._number = 0
            self._notes = {key: one for key, one in self._notes.items() if key[0] >= self.epoch}
            died = [peer.left for peer in self._peers.values() if peer.left and peer.has_died]
            self.failure = died[0] if died else self._early.pop(self.epoch, None)

    def cause_within(self, seconds: float) -> Cause | None:
        """Why a transfer broke off; waits a while for the news of it."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self.all_here, seconds)
            left = (peer.left for peer in self._peers.values() if peer.left is not None)
            return self.failure or next(left, None)

    @property
    def all_here(self) -> bool:
        """Whether no other rank has left."""
        return all(peer.left is None for peer in self._peers.values())

    def ask_all(self) -> dict[int, Place]:
        """Where every rank is; what is known of those that do not answer within a second."""
        with self._changed:
            self._questions += 1
            question = self._questions
            answers = self._answers[question] = {self.rank: self._describe()}
        self._tell_all(_ASK, b"", number=question)
        with self._changed:
            self._changed.wait_for(lambda: len(answers) > len(self._peers), _URGENT_S)
            del self._answers[question]
            for peer in self._peers.values():
                answers.setdefault(peer.rank, self._silence(peer))
            return dict(sorted(answers.items()))

    def _silence(self, peer: _Peer) -> Place:
        if peer.left is not None:
            return Place(f"gone: {peer.left.message}", True)
        seconds = time.monotonic() - peer.heard_s
        return Place(f"does not answer, last heard {seconds:.1f} s ago: stopped, or cut off", True)

    def close(self, reason: str, cause: Cause | None = None) -> None:
        """End the connections; others are told that this was meant, and why.

        Args:
            reason: Why, in words.
            cause: The failure that led to it, if one did: the others name that, not its witness.
        """
        if self._closing:
            return
        self._closing = True
        farewell = {"reason": reason, "cause": None if cause is None else asdict(cause)}
        self._tell_all(_FAREWELL, json.dumps(farewell).encode())
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for peer in self._peers.values():
            peer.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _tell_all(self, kind: int, payload: bytes, *, number: int = 0) -> None:
        until = time.monotonic() + _URGENT_S
        for peer in self._peers.values():
            with suppress(TransportError, RemoteError):
                left_s = max(0.0, until - time.monotonic())
                self._tell(peer, kind, payload, number=number, within_s=left_s, urgent=True)

    def _tell(
        self,
        peer: _Peer,
        kind: int,
        payload: bytes,
        *,
        number: int,
        within_s: float,
        urgent: bool = False,
    ) -> None:
        frame = _HEADER.pack(_MAGIC, kind, self.epoch, number, len(payload)) + payload
        until = time.monotonic() + within_s
        if not peer.lock.acquire(timeout=within_s):
            raise HangError(f"rank {peer.rank} took no message for {within_s:g} s")
        try:
            left = memoryview(frame)
            while left:
                if peer.left is not None:
                    return  # who waits for it is told so
                if not urgent and self.failure is not None and not self.failure.has_left:
                    raise self.failure.error()
                left = left[peer.send(left) :]
                if left and time.monotonic() > until:
                    peer.break_off()  # a part of a frame would spoil all that follow
                    raise HangError(f"rank {peer.rank} took no message for {within_s:g} s")
        finally:
            peer.lock.release()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for peer in self._peers.values():
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    self._read_from(key.data, selector)

    def _read_from(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        peer.heard_s = time.monotonic()
        frames, end = peer.frames()
        # failures first: a note must not wake one who would not know yet that it is void
        for kind, epoch, number, payload in sorted(frames, key=lambda one: one[0] != _FAILURE):
            self._take(peer, kind, epoch, number, payload)
        if end is not None:
            selector.unregister(peer.connection)
            reason = str(end) or type(end).__name__
            told = f"rank {peer.rank} has died, or its host is out of reach ({reason})"
            self._leave(peer, Cause(rank=peer.rank, message=told), died=True)

    def _leave(self, peer: _Peer, cause: Cause, *, died: bool) -> None:
        """A rank is gone; one that said farewell fails only those that wait for it."""
        with self._changed:
            if peer.left is not None or self._closing:
                return
            peer.left = replace(cause, is_final=True, has_left=True)
            peer.has_died = died
            self._changed.notify_all()
        if died:
            self._note_failure(peer.left, self.epoch)

    def _take(self, peer: _Peer, kind: int, epoch: int, number: int, payload: bytes) -> None:
        if kind == _NOTE:
            with self._changed:
                if epoch >= self.epoch:
                    self._notes.setdefault((epoch, number), {})[peer.rank] = payload
                    self._changed.notify_all()
        elif kind == _FAILURE:
            self._note_failure(Cause(**json.loads(payload)), epoch)
        elif kind == _ASK:
            # not here: telling may take a while, and this thread must go on reading
            threading.Thread(target=self._answer, args=(peer, number), daemon=True).start()
        elif kind == _ANSWER:
            with self._changed:
                if number in self._answers:
                    self._answers[number][peer.rank] = Place(*json.loads(payload))
                    self._changed.notify_all()
        else:
            farewell = json.loads(payload)
            told = f"rank {peer.rank} has closed its engine: {farewell['reason']}"
            cause = Cause(rank=peer.rank, message=told)
            if farewell["cause"] is not None:
                cause = Cause(**farewell["cause"])
            self._leave(peer, cause, died=False)

    def _answer(self, peer: _Peer, number: int) -> None:
        with suppress(TransportError, RemoteError):
            answer = json.dumps(self._describe()).encode()
            self._tell(peer, _ANSWER, answer, number=number, within_s=_URGENT_S, urgent=True)

    def _note_failure(self, cause: Cause, epoch: int) -> None:
        with self._changed:
            if epoch > self.epoch:
                self._early.setdefault(epoch, cause)
                return
            if epoch < self.epoch or self._closing or self.failure is not None:
                return
            self.failure = cause
            self._changed.notify_all()
        self._on_failure(cause)


class _Peer:
    """The connection to one other rank."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.connection = connection
        self.lock = threading.Lock()
        self.left: Cause | None = None
        """Why nothing will come any more, if so."""
        self.has_died = False
        self.heard_s = time.monotonic()
        self._header = bytearray(_HEADER.size)
        self._body: bytearray | None = None
        self._filled = 0

    def send(self, data: memoryview) -> int:
        """Send what fits, after waiting a moment for room; returns how many bytes that was."""
        try:
            return self.connection.send(data)
        except BlockingIOError:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_WRITE)
                selector.select(0.02)
            return 0
        except OSError:
            return len(data)  # gone: the reader finds out

    def frames(self) -> tuple[list[_Frame], OSError | None]:
        """The frames that have come, and why nothing more will come, if so."""
        found: list[_Frame] = []
        try:
            while self._fill(self._header if self._body is None else self._body):
                magic, kind, epoch, number, size = _HEADER.unpack(self._header)
                if magic != _MAGIC:
                    raise ConnectionError("what came is no frame")
                if self._body is None:
                    self._body, self._filled = bytearray(size), 0
                    if size:
                        continue
                found.append((kind, epoch, number, bytes(self._body)))
                self._body, self._filled = None, 0
        except OSError as error:
            return found, error
        return found, None

    def _fill(self, target: bytearray) -> bool:
        """Receive what there is for it; whether it is full."""
        while self._filled < len(target):
            try:
                count = self.connection.recv_into(memoryview(target)[self._filled :])
            except BlockingIOError:
                return False
            if count == 0:
                raise ConnectionResetError("the connection ended")
            self._filled += count
        return True

    def break_off(self) -> None:
        """End the connection, from any thread."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection."""
        self.break_off()
        self.connection.close()
