"""Watching forked ranks: who failed, how, and that none outlives the others."""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

GRACE_S = 3.0
"""How long ranks have to leave by themselves after one failed, and to say why."""

TERMINATE_S = 2.0
"""How long a rank has to obey a request to end before it is killed."""


@dataclass(slots=True)
class Child:
    """A forked rank.

    Args:
        rank: Its rank.
        pid: Its process.
        reports: The end of a pipe on which it says why it failed; closed when it ends.
        said: What it has said so far.
        ended: Whether it is gone and waited for.
    """

    rank: int
    pid: int
    reports: int
    said: bytes = b""
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended badly.

    Args:
        rank: Its rank.
        what: What it did, to follow its name: `raised X: ...`, `was ended by SIGKILL`.
        message: The message of the error it raised, if it raised one.
        time_s: When it raised it, on the clock all processes share; 0 for a rank that died without
            a word, which nothing another rank raises can be the cause of.
        is_input: Whether that was an `InputError`.
        is_follow_up: Whether it failed because another rank had.
        trace: Traceback, if one helps.
    """

    rank: int
    what: str
    message: str = ""
    time_s: float = 0.0
    is_input: bool = False
    is_follow_up: bool = False
    trace: str = ""


def watch(children: Sequence[Child]) -> list[Failure]:
    """Wait until all ranks have ended, or for a while longer after one has failed.

    Returns:
        The failures, in any order; empty if all went well.
    """
    failures: list[Failure] = []
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.reports, selectors.EVENT_READ, child)
        while selector.get_map():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = selector.select(left)
            if not ready and left is not None:
                break
            for key, _ in ready:
                child: Child = key.data
                piece = os.read(child.reports, 65536)
                child.said += piece
                if piece:
                    continue
                selector.unregister(child.reports)
                failures += _wait_for(child)
            if failures and deadline is None:
                deadline = time.monotonic() + GRACE_S
    return failures


def end(children: Sequence[Child]) -> None:
    """End the ranks that are left: ask, then kill. Waits until they are gone."""
    left = [child for child in children if not child.ended]
    for child in left:
        os.kill(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_S
    while left and time.monotonic() < deadline:
        left = [child for child in left if not _is_gone(child)]
        time.sleep(0.01)
    for child in left:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.ended = True
    for child in children:
        os.close(child.reports)


def _is_gone(child: Child) -> bool:
    child.ended = os.waitpid(child.pid, os.WNOHANG)[0] != 0
    return child.ended


def _wait_for(child: Child) -> list[Failure]:
    """The failure of a rank that has closed its pipe, or none."""
    _, status = os.waitpid(child.pid, 0)
    child.ended = True
    if child.said:
        body = json.loads(child.said)
        what = f"failed: {body.pop('name')}: {body['message']}"
        return [Failure(rank=child.rank, what=what, **body)]
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return []
    if code < 0:
        return [Failure(rank=child.rank, what=f"was ended by {signal.Signals(-code).name}")]
    return [Failure(rank=child.rank, what=f"ended with status {code}")]
