"""A thread that does the waiting of one channel, so that the engine's thread can always leave.

Such threads do not keep a process alive. They are given a moment to end before its interpreter
does: a thread that is inside gloo when Python takes itself apart aborts the process.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from stretto.runtime.wire.transport import Pending

_LEAVING_S = 2.0
"""How long threads together have to end when the interpreter does."""

_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a thread that is waited for a moment, and not longer, when the program ends."""
    thread = threading.Thread(target=target, name=f"stretto-{name}", daemon=True)
    _THREADS.add(thread)
    thread.start()
    return thread


@atexit.register
def _let_threads_end() -> None:
    deadline = time.monotonic() + _LEAVING_S
    for thread in list(_THREADS):
        thread.join(max(0.0, deadline - time.monotonic()))


class Job(Protocol):
    """Work for a channel's thread, and whom to tell of its end."""

    @property
    def pending(self) -> Pending:
        """The transfer this belongs to."""
        ...


J = TypeVar("J", bound=Job)


class Worker(Generic[J]):
    """Does jobs one after the other; after a failure the rest fail alike.

    Args:
        name: Name of the thread.
        work: Does one job; blocks as long as it takes.
        on_end: Called by the thread when it ends, to let go of what it used.
    """

    def __init__(
        self, name: str, work: Callable[[J], None], on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._work = work
        self._on_end = on_end
        self._broken: BaseException | None = None
        self._open: set[Pending] = set()
        self._left = 0
        self._lock = threading.Lock()
        start_thread(name, self._run)

    @property
    def is_idle(self) -> bool:
        """Whether no job is waiting or under way; asked by the thread that puts jobs."""
        return self._left == 0 and self._broken is None

    def put(self, job: J) -> None:
        """Hand over a job."""
        with self._lock:
            self._left += 1
            self._open.add(job.pending)
        self._jobs.put(job)
        if self._broken is not None:
            self.fail(self._broken)

    def fail(self, error: BaseException) -> None:
        """Fail all jobs, from any thread; the job under way ends when its wait does."""
        if self._broken is None:
            self._broken = error.with_traceback(None)  # a traceback would hold its frames
        with self._lock:
            waiting = [pending for pending in self._open if not pending.is_done]
        for pending in waiting:
            pending.fail(self._broken)

    def stop(self) -> None:
        """End the thread once it is idle."""
        self._jobs.put(None)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                self._on_end()
                # these hold connections, and whoever made them holds this
                self._work, self._on_end = _ended, lambda: None
                return
            pending = job.pending
            try:
                if self._broken is None:
                    self._work(job)
            except Exception as error:
                if self._broken is None:
                    self._broken = error.with_traceback(None)
            if self._broken is not None and not pending.is_done:
                pending.fail(self._broken)
            with self._lock:
                self._open.discard(pending)
                self._left -= 1
            del job, pending


def _ended(job: object) -> None:
    raise AssertionError(f"{job} came after the last job")
