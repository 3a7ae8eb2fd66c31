"""Starting ranks: they work together, fail by name, and none is left behind.

Each scenario runs in a process of its own, so that what it forks is not the test runner.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

LIMIT_S = 60

SCENARIOS = """
import json, os, signal, sys, time
import torch
from torch import distributed
from stretto.errors import InputError, TransportError
from stretto.train import children
from stretto.train.launch import run_ranks

children.TERMINATE_S = 0.5
folder = sys.argv[1]

def note(name, value):
    with open(f"{folder}/{name}-{os.getpid()}", "w") as file:
        file.write(str(value))

def together(rank):
    total = torch.tensor([rank])
    distributed.all_reduce(total)
    note("together", json.dumps([rank, total.item(), torch.get_num_threads()]))

def raises(rank):
    note("raises", rank)
    if rank == 1:
        raise RuntimeError("boom")
    time.sleep(60)

def killed(rank):
    note("killed", rank)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

def mistaken(rank):
    raise InputError("lr is -1; it must be positive")

def follows(rank):
    distributed.barrier()
    if rank == 0:
        raise TransportError("connection lost")
    if rank == 1:
        time.sleep(0.1)
        raise ValueError("the cause")
    time.sleep(0.2)
    raise RuntimeError("connection lost too")

def stubborn(rank):
    note("stubborn", rank)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    distributed.barrier()
    if rank == 0:
        raise RuntimeError("stop")
    time.sleep(60)

for work in (together, raises, killed, mistaken, follows, stubborn):
    # Ranks that sleep are ended soon, ranks that follow another have time to say so.
    children.GRACE_S = 20.0 if work is follows else 0.3
    start = time.monotonic()
    try:
        run_ranks(work, 3)
        error = None
    except Exception as caught:
        error = [type(caught).__name__, str(caught), getattr(caught, "rank", None)]
    print(json.dumps([work.__name__, error, time.monotonic() - start]), flush=True)
"""

WAITING = """
import os, sys, time
from stretto.train.launch import run_ranks

def work(rank):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(60)

try:
    run_ranks(work, 2)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""

JOINING = """
import sys
from torch import distributed
from stretto.train.launch import run_ranks

run_ranks(lambda rank: print(rank, distributed.get_world_size(), distributed.get_rank()), 2)
"""


@contextmanager
def started(script: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen]:
    """A process that runs this script; it is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int], within_s: float) -> bool:
    """Whether all these processes have ended by then."""
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def noted(tmp_path_factory) -> Path:
    """The folder in which the ranks of the scenarios leave notes."""
    return tmp_path_factory.mktemp("noted")


@pytest.fixture(scope="module")
def scenarios(noted) -> dict[str, tuple[list | None, float]]:
    """The error and the seconds of each scenario, and what was printed on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", SCENARIOS, str(noted)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 6, done.stderr
    outcomes = {name: (error, seconds) for name, error, seconds in lines}
    return {**outcomes, "stderr": (done.stderr, 0.0)}


def pids_of(noted: Path, name: str) -> list[int]:
    """The processes that left a note under this name."""
    return [int(path.name.rpartition("-")[2]) for path in noted.glob(f"{name}-*")]


def test_ranks_share_a_group_and_have_one_thread(scenarios, noted):
    """Every rank is called once, can talk to the others, and computes in one thread."""
    assert scenarios["together"][0] is None
    notes = sorted(json.loads(path.read_text()) for path in noted.glob("together-*"))
    assert notes == [[0, 3, 1], [1, 3, 1], [2, 3, 1]]


def test_a_rank_that_raises_is_named(scenarios, noted):
    """The error tells rank, type and text, and the traceback is on standard error once."""
    error, seconds = scenarios["raises"]
    assert error == ["ExecutionError", "rank 1 failed: RuntimeError: boom", 1]
    assert scenarios["stderr"][0].count("RuntimeError: boom") == 1
    assert seconds < 10
    assert not any(map(is_running, pids_of(noted, "raises")))


def test_a_rank_that_is_killed_is_named(scenarios, noted):
    """The error tells rank and signal, and the other ranks are ended."""
    error, seconds = scenarios["killed"]
    assert error == ["ExecutionError", "rank 2 was ended by SIGKILL", 2]
    assert seconds < 10
    assert not any(map(is_running, pids_of(noted, "killed")))


def test_a_users_mistake_stays_one(scenarios):
    """An InputError in the ranks is raised as it is, without a traceback."""
    assert scenarios["mistaken"][0] == ["InputError", "lr is -1; it must be positive", None]
    assert "must be positive" not in scenarios["stderr"][0]


def test_the_cause_is_named_not_what_followed(scenarios):
    """A lost connection is not the error if another rank says why it left."""
    assert scenarios["follows"][0] == ["ExecutionError", "rank 1 failed: ValueError: the cause", 1]


def test_a_rank_that_will_not_end_is_killed(scenarios, noted):
    """Ranks that ignore a request to end are gone all the same."""
    error, seconds = scenarios["stubborn"]
    assert error[1] == "rank 0 failed: RuntimeError: stop"
    assert seconds < 10
    assert len(pids_of(noted, "stubborn")) == 3
    assert not any(map(is_running, pids_of(noted, "stubborn")))


@pytest.mark.parametrize(
    ("sent", "status", "printed"),
    [(signal.SIGKILL, -9, ""), (signal.SIGTERM, -15, ""), (signal.SIGINT, 130, "interrupted\n")],
)
def test_no_rank_outlives_the_launcher(tmp_path, sent, status, printed):
    """Whatever ends the launcher ends its ranks; Ctrl-C is raised once they are gone."""
    with started(WAITING, str(tmp_path)) as launcher:
        deadline = time.monotonic() + LIMIT_S
        while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # Ctrl-C reaches every process of the terminal, the other signals the launcher alone.
        (os.killpg if sent == signal.SIGINT else os.kill)(launcher.pid, sent)
        output, errors = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, output, errors) == (status, printed, "")
    assert all_end(pids, within_s=5)


def as_rank(rank: int, world_size: int, port: int) -> AbstractContextManager[subprocess.Popen]:
    """A process started as torchrun would."""
    return started(
        JOINING,
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def test_under_torchrun_a_process_is_a_rank():
    """With torchrun's variables set, the process joins instead of forking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with as_rank(0, 2, port) as first, as_rank(1, 2, port) as second:
        for rank, process in enumerate((first, second)):
            assert process.communicate(timeout=LIMIT_S)[0] == f"{rank} 2 {rank}\n"
            assert process.returncode == 0


def test_under_torchrun_the_number_of_ranks_must_fit():
    """Another number of processes than ranks is refused before anything is connected."""
    with as_rank(0, 3, 1) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "schedule.num_ranks is 2 but torchrun started 3 processes" in errors
