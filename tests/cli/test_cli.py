"""The commands as a user runs them: what they print, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = ("--ranks", "2", "--microbatches", "2")


def stretto(*words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "stretto", *words], capture_output=True, text=True, timeout=timeout
    )


def test_show_draws_a_schedule_with_its_figures() -> None:
    """The drawing, then makespan, bubble and peaks."""
    answer = stretto("show", "one_f_one_b", *SMALL)
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == [
        "rank 0 | 0F0 0F1  .   .  0B0 ===  .  0B1 ===",
        "rank 1 |  .  1F0 1B0 === 1F1 1B1 ===  .   .",
        "makespan 9, longest rank span 9, bubble 33.3 %, peak per rank 2 1",
    ]


@pytest.mark.parametrize("form", ["csv", "json"])
def test_what_show_writes_check_proves_and_simulate_times(form: str, tmp_path: Path) -> None:
    """A file goes from verb to verb."""
    written = stretto(
        "show",
        "interleaved_1f1b",
        "--ranks",
        "4",
        "--microbatches",
        "8",
        "--stages-per-rank",
        "2",
        "--format",
        form,
    )
    file = tmp_path / f"schedule.{form}"
    file.write_text(written.stdout)
    proved = stretto("check", str(file))
    assert proved.returncode == 0
    assert proved.stdout.startswith("good: 4 ranks, 8 stages, 8 microbatches; proved for buffered")
    assert "peak per rank 11 9 7 5" in proved.stdout
    timed = stretto("simulate", str(file), "--json")
    figures = json.loads(timed.stdout)
    assert figures["makespan"] == figures["lower_bound"] == 57
    assert figures["peak_memory"] == [11, 9, 7, 5]


def test_check_tells_what_is_wrong_and_ends_with_1(tmp_path: Path) -> None:
    """The violations in words, or as JSON."""
    file = tmp_path / "broken.csv"
    file.write_text("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    answer = stretto("check", str(file))
    assert answer.returncode == 1
    assert "rank 0, position 1: 0B1 before 0F1" in answer.stdout
    body = json.loads(stretto("check", str(file), "--json").stdout)
    assert body["good"] is False
    assert body["violations"][0]["rule"] == "order"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert stretto("check", str(file), "--memory", "2").returncode == 0
    assert stretto("check", str(file), "--memory", "1").returncode == 1


def test_check_proves_for_communicators_and_prints_the_circle(tmp_path: Path) -> None:
    """A schedule is lowered for them; a program is proved as it is."""
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    proved = stretto("check", str(file), "--transport", "nccl", "--communicators", "shared")
    assert proved.returncode == 0
    assert "proved for nccl (shared, batched) sends" in proved.stdout
    file.write_text("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert stretto("check", str(file), "--transport", "nccl", "--no-batched").returncode == 0
    hangs = stretto("check", str(file), "--transport", "nccl", "--communicators", "shared")
    assert hangs.returncode == 1
    assert "0SEND_F0 (position 2) is behind 0RECV_B0 (position 0), the head of" in hangs.stdout


NEWER = json.dumps({"format": "stretto-schedule", "version": 99})
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("show", "gpip", *SMALL), "no schedule is called 'gpip' (did you mean 'gpipe'?)"),
    (("show", "gpipe", "--ranks", "2", "--microbatches", "0"), "num_microbatches is 0"),
    (("show", "gpipe", "--ranks", "2"), "needs --microbatches"),
    (("show", "gpipe", *SMALL, "--stages-per-rank", "2"), "gpipe takes no stages_per_rank"),
    (("show", "interleaved_1f1b", *SMALL), "needs stages_per_rank"),
    (("show", "gpipe", *SMALL, "--format", "png"), "png"),
    (("show", "gpipe", *SMALL, "--bogus", "1"), "--bogus"),
    (("show", "gpipe", "--ranks", "two", "--microbatches", "2"), "two"),
    (("simulate", "gpipe", *SMALL, "--unit-costs", "1,1"), "must be three numbers"),
    (("simulate", "gpipe", *SMALL, "--latency", "x"), "'x' is not a number"),
    (("check", "no-such-file.csv"), "cannot read no-such-file.csv"),
    (("check", "{newer}"), "version 99 is not known to this release, which reads version 1"),
    (("check", "{newer}", "--transport", "eager"), "eager"),
    (("check", "{newer}", "--communicators", "shared"), "belong to --transport nccl"),
    (("train", "no-such-file.toml"), "cannot read the configuration no-such-file.toml"),
    (("train", "{config}", "--schedule.name", "gpip"), "gpip"),
    (("train", "{config}", "--schedule.num_microbatches", "0"), "num_microbatches is 0"),
    (("train", "{config}", "--schedule.num_ranks", "16"), "8 layers for 32 stages"),
    (("train", "{config}", "--data.batch_size", "4"), "batch_size is 4"),
    (("train", "{config}", "--model.dimm", "4"), "did you mean model.dim?"),
    (("train", "{config}", "--model.dim"), "--model.dim needs a value"),
    (("bogus",), "bogus"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_end_with_2_and_one_line(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    """One line on standard error that names the value; no traceback, nothing on standard output."""
    newer = tmp_path / "newer.json"
    newer.write_text(NEWER)
    config = Path(__file__).parents[2] / "examples" / "shakespeare.toml"
    filled = [word.format(newer=newer, config=config) for word in words]
    answer = stretto(*filled)
    assert answer.returncode == 2, answer
    assert told in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr
    assert answer.stdout == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    """`show | head -1` ends quietly."""
    command = (
        f"{sys.executable} -m stretto show gpipe --ranks 8 --microbatches 64 | head -1 >/dev/null"
    )
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert answer.stderr == ""


def test_pure_verbs_do_not_load_torch() -> None:
    """Showing, checking and simulating need the standard library and the command line only."""
    code = (
        "import sys\n"
        "from stretto.cli.main import run\n"
        f"status = run(['show', 'gpipe', *{SMALL!r}])\n"
        "assert status == 0 and 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert answer.returncode == 0, answer.stderr


def test_version_and_help_are_there() -> None:
    """Both print and end with 0."""
    assert stretto("--version").stdout.strip() == "0.1.0.dev0"
    assert "simulate" in stretto("--help").stdout


def test_ctrl_c_ends_a_training_with_one_line(tmp_path: Path) -> None:
    """Interrupted, the command says so in one line, ends with 3, and leaves no process."""
    config = Path(__file__).parents[2] / "examples" / "shakespeare.toml"
    words = [sys.executable, "-m", "stretto", "train", str(config), "--ranks", "2"]
    words += ["--run.directory", str(tmp_path), "--run.name", "stopped", "--run.steps", "100000"]
    words += ["--schedule.name", "one_f_one_b", "--schedule.split", "even"]
    text = config.read_text().replace("stages_per_rank = 2", "")
    own = tmp_path / "config.toml"
    own.write_text(text)
    words[4] = str(own)
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log = tmp_path / "stopped" / "log.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") > 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert errors.strip().splitlines() == ["stretto: interrupted"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
