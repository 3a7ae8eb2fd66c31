"""The one interface between the engine and whatever carries its messages.

A transport carries messages over channels (`ir.deps.Channel`): ordered streams from a rank to a
rank, activations and gradients apart. Both ends know the order from the plan. Sends never make
the caller wait for the receiver, unless the transport is told to behave so (for tests).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from stretto.errors import ExecutionError, HangError, TransportError
from stretto.ir import SENDS, Action, Channel, Communicators, Schedule
from stretto.runtime.wire.message import Message
from stretto.runtime.wire.progress import Progress


class Pending:
    """A transfer under way: done or failed at some time, from any thread.

    Args:
        action: The SEND or RECV, printed in errors.
        channel: Where it travels.
    """

    def __init__(self, action: Action, channel: Channel) -> None:
        self.action = action
        self.channel = channel
        self.message: Message | None = None
        self.error: BaseException | None = None
        self.done_ns = 0
        self._done = threading.Event()

    def __str__(self) -> str:
        """The transfer, and the rank at its other end."""
        source, target, _ = self.channel
        is_send = self.action.kind in SENDS
        return f"{self.action} {f'to rank {target}' if is_send else f'from rank {source}'}"

    def finish(self, now_ns: int) -> None:
        """The transfer is over; a RECV has been given its `message` before."""
        self.done_ns = now_ns
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """The transfer will never be over."""
        self.error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether the transfer is over or failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> Message | None:
        """Wait until the transfer is over; an error is raised once, and then forgotten.

        Raises:
            HangError: it took longer than `timeout_s`.
            TransportError: it failed.
            ExecutionError: another rank failed and this transfer was called off.
        """
        if not self._done.wait(timeout_s):
            source, target, _ = self.channel
            mine, other = (source, target) if self.action.kind in SENDS else (target, source)
            raise HangError(
                f"rank {mine}: {self.action} on channel {self.channel} waited {timeout_s:g} s for "
                f"rank {other}",
                rank=mine,
                action=str(self.action),
            )
        # an error that stayed here would hold this frame by its traceback, and the frame all it has
        error, self.error = self.error, None
        try:
            if isinstance(error, ExecutionError):
                raise error
            if error is not None:
                raise TransportError(
                    f"{self.action} on channel {self.channel} failed: {error}",
                    action=str(self.action),
                ) from error
        finally:
            del error
        message, self.message = self.message, None  # whoever else holds the transfer lets go
        return message


class Transport(Protocol):
    """Carries the messages of one engine; made by its group, closed with it."""

    def begin(self, program: Schedule) -> None:
        """The transfers that follow are this rank's of this lowered program, in its order."""
        ...

    def send(self, channel: Channel, action: Action, message: Message) -> Pending:
        """Send the message; its tensors may change as soon as this returns."""
        ...

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Post a receive; the pending transfer delivers the message."""
        ...

    def metadata_count(self) -> int:
        """How many layouts this rank has sent so far."""
        ...

    def close(self) -> None:
        """Nothing more will be sent or received; what was sent still arrives."""
        ...


class Group(Protocol):
    """The ranks of one engine, seen from one of them.

    All ranks make the same calls in the same order. A step that fails on one rank fails on all;
    those that wait are woken, the others learn of it from `check` or at their next call.
    """

    @property
    def rank(self) -> int:
        """This rank within the pipeline."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        ...

    @property
    def communicators(self) -> Communicators | None:
        """Which channels share a communicator, under NCCL's rules; None if each is a stream."""
        ...

    @property
    def progress(self) -> Progress:
        """Where this rank is; shown on all ranks when one waits too long."""
        ...

    def connect(self, channels: Sequence[Channel]) -> Transport:
        """Make a transport for these channels: at first, and again after each step that failed."""
        ...

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """Exchange a few bytes: every rank gets every rank's, in rank order."""
        ...

    def broadcast(self, payload: bytes | None, source: int, what: str) -> bytes:
        """Every rank gets what the source rank gives; the others give None."""
        ...

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            RemoteError: it has; says which and why.
        """
        ...

    def explain(self, error: TransportError) -> ExecutionError:
        """The error to raise instead: with the rank that broke off, or where all ranks hang."""
        ...

    def fail(self, error: BaseException) -> bool:
        """End the step on all ranks for an error of this one; whether there can be another step."""
        ...

    def close(self, reason: str) -> None:
        """Give up what the group made for itself; the user's own group is left alone."""
        ...
