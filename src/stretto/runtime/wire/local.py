"""One rank alone: nothing to carry."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir import Action, Channel, Schedule
from stretto.runtime.wire.message import Message
from stretto.runtime.wire.transport import Pending


class LocalGroup:
    """A pipeline of one rank, and its transport, which is never asked to carry anything."""

    rank = 0
    num_ranks = 1
    communicators = None

    def connect(self, channels: Sequence[Channel]) -> LocalGroup:
        """Itself: there are no channels."""
        assert not channels, "a single rank has no channel"
        return self

    def gather(self, payload: bytes) -> list[bytes]:
        """The payload alone."""
        return [payload]

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        """The payload itself."""
        assert payload is not None and source == 0
        return payload

    def begin(self, program: Schedule) -> None:
        """Nothing is ever sent."""

    def send(self, channel: Channel, action: Action, message: Message) -> Pending:
        """Never called: edges inside a rank do not use the transport."""
        raise AssertionError(f"{action}: a single rank sends nothing")

    def receive(self, channel: Channel, action: Action) -> Pending:
        """Never called: edges inside a rank do not use the transport."""
        raise AssertionError(f"{action}: a single rank receives nothing")

    def metadata_count(self) -> int:
        """Nothing is ever sent."""
        return 0

    def abort(self, error: BaseException) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing was made."""
