"""Starting ranks: local processes forked from this one, or joining those that torchrun started.

Local ranks are forked after torch is imported, so they are up in a fraction of a second. They end
with this process, whatever ends it, and with each other: when one fails, the rest are ended.
What a failed rank raised is raised here, with the rank named.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
from torch import distributed

from stretto.errors import (
    EngineClosedError,
    ExecutionError,
    InputError,
    RemoteError,
    StageError,
    StrettoError,
    TransportError,
)
from stretto.train.children import Child, Failure, end, watch

HOST = "127.0.0.1"
START_TIMEOUT = timedelta(seconds=60)
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOLLOW_UPS = (RemoteError, TransportError, EngineClosedError, distributed.DistError)
"""What a rank raises because another one failed; never the cause if there is another."""

_PR_SET_PDEATHSIG = 1


def joined_rank() -> int | None:
    """This process's rank if torchrun started it, else None."""
    if any(name not in os.environ for name in TORCHRUN_VARIABLES):
        return None
    return int(os.environ["RANK"])


def run_ranks(work: Callable[[int], None], num_ranks: int) -> None:
    """Call `work(rank)` on every rank, inside a gloo process group, and wait for all.

    Under torchrun this process is one of the ranks; otherwise all are forked from here, each with
    one intra-op thread. Call it from the main thread, and before torch ran in several threads.

    Args:
        work: What a rank does; the default process group exists meanwhile.
        num_ranks: Number of ranks.

    Raises:
        InputError: a rank raised it, or torchrun started another number of ranks.
        ExecutionError: a rank raised anything else, or died; its rank is in the message.
        KeyboardInterrupt: on Ctrl-C, after all ranks have ended.
    """
    torch.set_num_threads(1)
    rank = joined_rank()
    if rank is None:
        _fork_ranks(work, num_ranks)
        return
    started = int(os.environ["WORLD_SIZE"])
    if started != num_ranks:
        raise InputError(
            f"schedule.num_ranks is {num_ranks} but torchrun started {started} processes; "
            "the numbers must be equal"
        )
    distributed.init_process_group("gloo")
    work(rank)
    distributed.destroy_process_group()


def _fork_ranks(work: Callable[[int], None], num_ranks: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    children: list[Child] = []
    with socket.create_server((HOST, 0), backlog=max(128, num_ranks)) as listener:
        port = listener.getsockname()[1]
        try:
            for rank in range(num_ranks):
                children.append(_fork(work, rank, num_ranks, port, listener))
            # Made after the forks: its threads must not be there when the process is copied.
            store = distributed.TCPStore(
                HOST,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=START_TIMEOUT,
                master_listen_fd=os.dup(listener.fileno()),
            )
            failures = watch(children)
            del store
        finally:
            end(children)
    if failures:
        raise _error_of(failures)


def _fork(
    work: Callable[[int], None], rank: int, num_ranks: int, port: int, listener: socket.socket
) -> Child:
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        os.close(read_end)
        listener.close()
        _be_rank(work, rank, num_ranks, port, write_end)
    os.close(write_end)
    return Child(rank=rank, pid=pid, reports=read_end)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends the ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _be_rank(
    work: Callable[[int], None], rank: int, num_ranks: int, port: int, reports: int
) -> NoReturn:
    """Do a rank's work and leave without running what belongs to the parent."""
    status = 1
    try:
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
        store = distributed.TCPStore(HOST, port, is_master=False, timeout=START_TIMEOUT)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        work(rank)
        distributed.destroy_process_group()
        status = 0
    except BaseException as error:
        os.write(reports, _report(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _report(error: BaseException) -> bytes:
    unforeseen = not isinstance(error, StrettoError) or isinstance(error, StageError)
    body = {
        "name": type(error).__name__,
        "message": str(error),
        "time_s": time.monotonic(),
        "is_input": isinstance(error, InputError),
        "is_follow_up": isinstance(error, FOLLOW_UPS),
        "trace": "".join(traceback.format_exception(error)) if unforeseen else "",
    }
    return json.dumps(body).encode()


def _error_of(failures: list[Failure]) -> InputError | ExecutionError:
    """The error of the rank that failed first, and not because another did."""
    cause = min(failures, key=lambda each: (each.is_follow_up, each.time_s))
    if cause.is_input:
        return InputError(cause.message)
    if cause.trace:
        print(cause.trace, end="", file=sys.stderr)
    return ExecutionError(f"rank {cause.rank} {cause.what}", rank=cause.rank)
