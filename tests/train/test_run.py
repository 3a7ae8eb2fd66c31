"""Whole runs on several ranks, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto.errors import InputError
from stretto.train.config_file import config_to_toml, make_config
from stretto.train.job import prepare
from stretto.train.loop import Stepped, run_loop
from stretto.train.run import train

LIMIT_S = 90

TRAIN = """
import sys
from stretto.errors import ExecutionError
from stretto.train.config_file import load_config
from stretto.train.run import train

try:
    train(load_config(sys.argv[1]), draw=lambda planned, measured: "drawn")
except KeyboardInterrupt:
    sys.exit(130)
except ExecutionError as error:
    sys.exit(str(error))
"""


@contextmanager
def running(body, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that trains with these settings; it is gone afterwards."""
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(make_config(body, {})))
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ranks_learn_what_one_rank_learns(small_body, tmp_path):
    """Two ranks log, bit for bit, the losses and norms that one rank computes."""
    alone = prepare(make_config(small_body, {"schedule.stages_per_rank": "4"}))
    small_body["schedule"]["num_ranks"] = 2
    with running(small_body, tmp_path) as process:
        output, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")
    path = tmp_path / "runs" / "small"
    log = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    logged = [(each["loss"], each["gradient_norm"]) for each in log if each["kind"] == "step"]
    steps = [each for each in run_loop(alone, rank=0, group=None) if isinstance(each, Stepped)]
    assert logged == [(each.loss, each.gradient_norm) for each in steps]
    assert output.splitlines()[-1] == f"run kept in {path}"
    assert "drawn" in output


def wait_for_steps(process: subprocess.Popen, log: Path) -> None:
    """Wait until a run that goes on for long has logged some steps."""
    deadline = time.monotonic() + LIMIT_S
    while not (log.exists() and log.read_text().count("\n") > 5):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


def test_ctrl_c_ends_a_run_and_keeps_its_log(small_body, tmp_path):
    """Interrupted in the middle, a run leaves what it has logged and no process."""
    small_body["schedule"]["num_ranks"] = 2
    small_body["run"]["steps"] = 100_000
    log = tmp_path / "runs" / "small" / "log.jsonl"
    with running(small_body, tmp_path) as process:
        wait_for_steps(process, log)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    assert all(json.loads(line) for line in log.read_text().splitlines())


def test_a_rank_that_dies_ends_the_run(small_body, tmp_path):
    """Killed in the middle, a rank is named in one line, though the others only miss it."""
    small_body["schedule"]["num_ranks"] = 2
    small_body["run"]["steps"] = 100_000
    with running(small_body, tmp_path) as process:
        wait_for_steps(process, tmp_path / "runs" / "small" / "log.jsonl")
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (1, "rank 1 was ended by SIGKILL\n")
    assert not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks)


def test_a_mistake_shows_before_any_folder_is_made(small_body, tmp_path):
    """Settings that do not fit leave nothing behind."""
    config = make_config(small_body, {"schedule.num_ranks": "8"})
    with pytest.raises(InputError, match="5 layers are too few for 16 stages"):
        train(config, draw=lambda planned, measured: "")
    assert not (tmp_path / "runs").exists()
