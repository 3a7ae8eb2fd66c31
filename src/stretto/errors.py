"""Every error stretto raises on purpose.

    StrettoError
    ├── InputError (also ValueError)   an argument, file or batch that cannot be used
    │   ├── ActionSyntaxError          text that is not an action
    │   ├── PlacementError             stages and ranks that do not fit together
    │   └── FormatError                a file of another format, version or content
    ├── ScheduleError                  a schedule that breaks a rule; carries the violations
    ├── EmptyTimelineError             a figure was asked of a timeline without compute spans
    ├── EndOfData                      the data of a rank has ended; raised on all ranks
    └── ExecutionError                 a run that failed; carries rank and, where known, the action
        ├── StageError                 user code raised inside an action
        ├── TransportError             a message did not get through
        │   └── HangError              a wait took too long; carries where every rank is
        ├── RemoteError                another rank refused or failed; carries its rank and text
        └── EngineClosedError          the engine cannot be used any more; carries the reason

An `InputError` is the caller's to mend: the command line prints it in one line and exits with 2.
An `ExecutionError` ends a run: the command line exits with 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class StrettoError(Exception):
    """Root of all errors raised on purpose."""


class InputError(StrettoError, ValueError):
    """An argument, file or batch cannot be used; the message names value, rule and remedy."""


class ActionSyntaxError(InputError):
    """A text is not an action.

    Args:
        text: The text that was read.
        reason: What is wrong with it.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(f"{text!r} is not an action: {reason}")
        self.text = text


class PlacementError(InputError):
    """Stages and ranks do not fit together."""


class FormatError(InputError):
    """A file is not of the format or version this release reads."""


class ScheduleError(StrettoError):
    """A schedule breaks rules; every violation is in the message and in `violations`."""

    def __init__(self, message: str, violations: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class EmptyTimelineError(StrettoError):
    """A figure needs at least one compute span and there is none."""


class EndOfData(StrettoError):
    """The data of a rank has ended; every rank hears of it in the same step.

    Args:
        message: Which ranks' data ended.
        ranks: These ranks.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ExecutionError(StrettoError):
    """A run failed.

    Args:
        message: What happened, in one sentence.
        rank: The rank it happened on, if known.
        action: The action it happened in, printed (`2F0`), if known.
    """

    def __init__(self, message: str, *, rank: int | None = None, action: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.action = action


class StageError(ExecutionError):
    """User code (a stage, the loss) raised inside an action; the cause is chained."""


class TransportError(ExecutionError):
    """A message could not be sent or received."""


class HangError(TransportError):
    """A rank waited for another longer than it may.

    Args:
        message: What was waited for, and where every rank is, if that is known.
        report: Rank → where it is, since when, and what it waits for.
        rank: The rank that waited.
        action: The action that waited, printed, if it was one.
    """

    def __init__(
        self,
        message: str,
        *,
        report: Mapping[int, str] | None = None,
        rank: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, action=action)
        self.report = dict(report or {})


class RemoteError(ExecutionError):
    """Another rank refused the step or failed in it.

    Args:
        message: What happened there, in one sentence.
        rank: The rank it happened on.
        action: The action it happened in, printed, if it was one.
        trace: The traceback of that rank, as text; empty if there is none.
        is_final: Whether that rank takes no further step.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        action: str | None = None,
        trace: str = "",
        is_final: bool = False,
    ) -> None:
        super().__init__(message, rank=rank, action=action)
        self.trace = trace
        self.is_final = is_final
        add_note = getattr(self, "add_note", None)  # since Python 3.11
        if trace and add_note is not None:
            add_note(f"on rank {rank}:\n{trace}")


class EngineClosedError(ExecutionError):
    """The engine was closed, or broke in an earlier step, and says why."""
