"""What is kept and shown of a run."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from stretto.ir.files import costs_from_json, timeline_from_json
from stretto.train.job import prepare
from stretto.train.journal import Journal
from stretto.train.loop import run_loop
from stretto.train.run_directory import RunDirectory


@pytest.fixture
def kept(small_config):
    """The folder of a finished run and what was shown of it."""
    job = prepare(small_config)
    directory = RunDirectory(small_config)
    file = io.StringIO()

    def draw(planned, measured):
        return f"{len(planned.spans)} over {len(measured.spans)}"

    journal = Journal(job, directory, Console(file=file), draw, is_one_host=True)
    for event in run_loop(job, rank=0, group=None):
        journal.take(event)
    journal.close()
    journal.conclude()
    return directory.path, file.getvalue()


def test_the_log_has_every_step_and_evaluation(kept):
    """Each is a line; recorded steps have both bubbles too."""
    path, _ = kept
    log = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    assert [(each["kind"], each["step"]) for each in log] == [
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
    ]
    assert [each["step"] for each in log if "bubble_measured" in each] == [3, 4]
    assert all(each["seconds"] > 0 for each in log if each["kind"] == "step")


def test_the_folder_has_plan_and_measurement(kept):
    """Recorded timelines, the costs taken from them and the plan they give can be read back."""
    path, _ = kept
    assert sorted(each.name for each in (path / "timelines").iterdir()) == [
        "000003.json",
        "000004.json",
    ]
    measured = timeline_from_json((path / "timelines" / "000004.json").read_text())
    planned = timeline_from_json((path / "planned.json").read_text())
    costs = costs_from_json((path / "costs.json").read_text())
    assert costs.num_stages == 2
    assert {s.action for s in planned.spans} <= {s.action for s in measured.spans}
    assert (path / "sample.txt").read_text().startswith("\n")
    assert (path / "split.txt").read_text().startswith("stage  rank")
    assert '"stretto-schedule"' in (path / "schedule.json").read_text()


def test_the_end_shows_what_came_of_it(kept):
    """Loss before and after, the sample, the drawing, and where the run lies; no cores shared."""
    path, shown = kept
    lines = shown.splitlines()
    assert lines[0].startswith("step 0/4  held-out ")
    assert "nats per character in 4 steps" in shown
    assert "--- sample ---" in shown
    assert " over " in shown
    assert lines[-1] == f"run kept in {path}"
    assert "shared" not in shown
