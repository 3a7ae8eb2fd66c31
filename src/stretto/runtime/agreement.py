"""Agreeing before anything is sent: a mistake on one rank becomes an error on every rank.

Ranks exchange a short note at construction and at the start of each step. A rank whose input
cannot be used says so in its note; the others raise the same error, naming that rank. Notes that
must be equal (schedule, mode, number of microbatches) are compared on every rank alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from stretto.errors import InputError, StrettoError

T = TypeVar("T")


def agree(
    gather: Callable[[bytes, str], list[bytes]],
    check: Callable[[], tuple[T, Mapping[str, Any]]],
    what: str,
    *,
    call: str | None = None,
) -> tuple[T, list[Mapping[str, Any]]]:
    """Run a check on every rank and go on only if it passes on all.

    Args:
        gather: Exchanges a few bytes with all ranks, as `Group.gather` does.
        check: Returns something for this rank and a note (JSON) for all.
        what: What is being agreed on, for the message.
        call: The same more exactly: must be equal on all ranks; by default `what`.

    Returns:
        This rank's result, and the notes of all ranks.

    Raises:
        Exception: the check failed here (its own error, of whatever kind) ...
        InputError: ... or on another rank, which the message names; or ranks made different calls.
    """
    checked: list[T] = []
    failure: Exception | None = None
    note: Mapping[str, Any] = {}
    try:
        mine, note = check()
        checked.append(mine)
    except Exception as error:
        failure = error
    told = None if failure is None else _told(failure)
    blob = json.dumps({"call": call or what, "error": told, "note": note})
    answers = [json.loads(one) for one in gather(blob.encode(), call or what)]
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # its traceback holds this frame: without the circle both go at once
    require_equal(answers, "call", "what is called")
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise InputError(f"rank {rank} refused {what}: {answer['error']}")
    return checked[0], [answer["note"] for answer in answers]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"


def require_equal(notes: Sequence[Mapping[str, Any]], key: str, what: str) -> Any:
    """The value all ranks gave for a key.

    Raises:
        InputError: they gave different values; all are named.
    """
    values = [note[key] for note in notes]
    if any(value != values[0] for value in values):
        told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise InputError(f"the ranks do not agree on {what} ({told}); it must be the same on all")
    return values[0]


def require_compatible(notes: Sequence[Mapping[str, Any]], key: str, what: str) -> Any:
    """The value of the ranks that know one (others say None); None if nobody does.

    Raises:
        InputError: two ranks know different values.
    """
    known = [(rank, note[key]) for rank, note in enumerate(notes) if note[key] is not None]
    for rank, value in known:
        if value != known[0][1]:
            raise InputError(
                f"the ranks do not agree on {what} (rank {known[0][0]}: {known[0][1]}, rank "
                f"{rank}: {value})"
            )
    return known[0][1] if known else None
