"""The test kit: run a pipeline of several ranks in one call, and get the results back.

Public, for the tests of models and schedules of your own.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from stretto.errors import ExecutionError, InputError, RemoteError, TransportError

TRANSPORTS = ("threads", "sockets", "gloo")


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    transport: str = "threads",
    rule: str = "buffered",
    timeout_s: float = 60.0,
    communicators: str = "per_direction",
) -> list[Any]:
    """Call `fn(rank, group, *args)` on every rank and return what each returned, in rank order.

    Args:
        fn: What a rank does; it gives `group` to its engine.
        num_ranks: Number of ranks, at least 1.
        args: Given to every rank as they are.
        transport: `threads`: the ranks are threads of this process. `sockets`, `gloo`: they are
            forked processes with one intra-op thread each, inside a default process group, and
            their engines talk over this; what they return must be picklable. Torch must not have
            run in several threads before.
        rule: For threads: `buffered`, `rendezvous`, `blocking` or `nccl`; see `InProcessHub`.
        timeout_s: After this time the ranks are given up, in seconds.
        communicators: For threads under `nccl`: `per_channel`, `per_direction` or `shared`.

    Raises:
        Exception: what a rank raised, whole; if several did, the one that did not raise because
            another had.
        ExecutionError: a rank died, or was not done in time.
    """
    if num_ranks < 1:
        raise InputError(f"num_ranks is {num_ranks}; it must be at least 1")
    if transport not in TRANSPORTS:
        raise InputError(f"transport is {transport!r}; it must be one of {', '.join(TRANSPORTS)}")
    if transport == "threads":
        return _run_threads(fn, num_ranks, args, rule, timeout_s, communicators)
    return _run_processes(fn, num_ranks, args, transport, timeout_s)


def _run_threads(
    fn: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any],
    rule: str,
    timeout_s: float,
    communicators: str,
) -> list[Any]:
    from stretto.runtime import InProcessHub

    hub = InProcessHub(num_ranks, rule=rule, timeout_s=timeout_s, communicators=communicators)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks

    def work(rank: int) -> None:
        try:
            results[rank] = fn(rank, hub.group(rank), *args)
        except BaseException as error:
            errors[rank] = error
            hub.fail(rank, error)

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    _raise_first(errors)
    if late:
        raise ExecutionError(f"ranks {late} were not done after {timeout_s:g} s", rank=late[0])
    return results


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    raised = [error for error in errors if error is not None]
    if raised:
        raise min(raised, key=lambda error: isinstance(error, RemoteError | TransportError))


def _run_processes(
    fn: Callable[..., Any], num_ranks: int, args: Sequence[Any], transport: str, timeout_s: float
) -> list[Any]:
    import multiprocessing

    from torch import distributed as dist

    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    # the port must be free before the store exists: the store's threads must not be forked
    with _Port() as port:
        processes = [
            context.Process(
                target=_child,
                args=(fn, rank, num_ranks, args, transport, port.number, pipes[rank][1], timeout_s),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()
        store = dist.TCPStore(
            "127.0.0.1",
            port.number,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=port.duplicate(),
        )
        try:
            return _collect(processes, [receiving for receiving, _ in pipes], timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            del store


class _Port:
    """A listening socket on a free port of this host."""

    def __enter__(self) -> _Port:
        import socket

        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.number: int = self._socket.getsockname()[1]
        return self

    def duplicate(self) -> int:
        """A file descriptor of its own for whoever serves the port."""
        import os

        return os.dup(self._socket.fileno())

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def _child(
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: Sequence[Any],
    transport: str,
    port: int,
    answer: Any,
    timeout_s: float,
) -> None:
    import os
    from datetime import timedelta

    import torch
    from torch import distributed as dist

    from stretto.runtime.wire.resolve import GroupOver
    from stretto.train.launch import die_with_parent

    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    status = 0
    try:
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        world = dist.group.WORLD
        assert world is not None
        result = fn(rank, GroupOver(world, transport), *args)
        answer.send_bytes(pickle.dumps((True, result)))
        dist.barrier()
    except BaseException as error:
        status = 1
        answer.send_bytes(_pickled_error(error))
    finally:
        answer.close()
        os._exit(status)


def _pickled_error(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        blob = pickle.dumps((False, (error, trace)))
        pickle.loads(blob)
        return blob
    except Exception:
        return pickle.dumps((False, (ExecutionError(f"{type(error).__name__}: {error}"), trace)))


def _collect(processes: Sequence[Any], pipes: Sequence[Any], timeout_s: float) -> list[Any]:
    from multiprocessing.connection import wait

    results: list[Any] = [None] * len(processes)
    errors: list[BaseException | None] = [None] * len(processes)
    waiting = dict(zip(pipes, range(len(processes)), strict=True))
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            _raise_first(errors)
            late = sorted(waiting.values())
            raise ExecutionError(f"ranks {late} were not done after {timeout_s:g} s", rank=late[0])
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                good, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                errors[rank] = ExecutionError(f"rank {rank} died without an answer", rank=rank)
                continue
            if good:
                results[rank] = answer
            else:
                error, trace = answer
                error.add_note(f"raised on rank {rank}:\n{trace}") if hasattr(
                    error, "add_note"
                ) else None
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + 5)
    _raise_first(errors)
    return results
