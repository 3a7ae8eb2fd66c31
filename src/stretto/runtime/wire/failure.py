"""Why a step ended: what one rank tells all others, and what they raise for it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from stretto.errors import EngineClosedError, ExecutionError, RemoteError, TransportError

_MAX_TRACE = 20_000
"""Characters of a traceback that travel: its end, which says what was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What one rank tells all others.

    Args:
        rank: The rank where it happened.
        message: What happened, in a sentence that names the rank.
        action: The action it happened in, printed, if it was in one.
        trace: The traceback, as text; empty if there is none.
        is_final: Whether that rank will take no further step.
        has_left: Whether nothing will come from that rank any more.
    """

    rank: int
    message: str
    action: str | None = None
    trace: str = ""
    is_final: bool = False
    has_left: bool = False

    def error(self) -> RemoteError:
        """What other ranks raise for it; each raises its own."""
        return RemoteError(
            self.message,
            rank=self.rank,
            action=self.action,
            trace=self.trace,
            is_final=self.is_final or self.has_left,
        )


def cause_of(rank: int, error: BaseException, *, is_final: bool = False) -> Cause:
    """What a rank tells of an error of its own."""
    text = str(error) or "without a message"
    told = f"rank {rank} failed: {type(error).__name__}: {text}"
    if isinstance(error, ExecutionError):
        rank = rank if error.rank is None else error.rank
        told = text if text.startswith("rank ") else told
    trace = "".join(traceback.format_exception(error))
    return Cause(
        rank=rank,
        message=told,
        action=getattr(error, "action", None),
        trace=trace[-_MAX_TRACE:],
        is_final=is_final,
    )


def ends_the_engine(error: BaseException) -> bool:
    """Whether no further step can be taken after this error.

    What user code raises leaves the ranks in order, also if another rank's did. A wire that broke,
    a rank that hangs or is gone, or an interruption from outside does not.
    """
    if isinstance(error, RemoteError):
        return error.is_final
    return not isinstance(error, Exception) or isinstance(error, TransportError | EngineClosedError)
