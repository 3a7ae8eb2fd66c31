"""One rank alone: nothing to carry."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import ExecutionError, TransportError
from stretto.ir import Action, Channel, Schedule
from stretto.runtime.wire.failure import ends_the_engine
from stretto.runtime.wire.message import Message
from stretto.runtime.wire.progress import Progress
from stretto.runtime.wire.transport import Pending


class LocalGroup:
    """A pipeline of one rank, and its transport, which is never asked to carry anything."""

    rank = 0
    num_ranks = 1
    communicators = None

    def __init__(self) -> None:
        self.progress = Progress()

    def connect(self, channels: Sequence[Channel]) -> LocalTransport:
        """A transport without channels."""
        assert not channels, "a single rank has no channel"
        return LocalTransport()

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """The payload alone."""
        return [payload]

    def broadcast(self, payload: bytes | None, source: int, what: str) -> bytes:
        """The payload itself."""
        assert payload is not None and source == 0
        return payload

    def check(self) -> None:
        """Nobody else can fail."""

    def explain(self, error: TransportError) -> ExecutionError:
        """The error itself."""
        return error

    def fail(self, error: BaseException) -> bool:
        """Nobody waits; whether there can be another step."""
        return not ends_the_engine(error)

    def close(self, reason: str) -> None:
        """Nothing was made."""


class LocalTransport:
    """Carries nothing: edges inside a rank do not use the transport."""

    def begin(self, program: Schedule) -> None:
        """Nothing is ever sent."""

    def send(self, channel: Channel, action: Action, message: Message) -> Pending:
        """Never called."""
        raise AssertionError(f"{action}: a single rank sends nothing")

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Never called."""
        raise AssertionError(f"{action}: a single rank receives nothing")

    def metadata_count(self) -> int:
        """Nothing is ever sent."""
        return 0

    def close(self) -> None:
        """Nothing was made."""
