"""The folder of a run."""

from __future__ import annotations

import json

import pytest

from stretto.errors import InputError
from stretto.ir import timeline_from_grid
from stretto.ir.files import timeline_from_json
from stretto.train.config_file import load_config, make_config
from stretto.train.run_directory import RunDirectory


def config_in(folder, name=""):
    """Settings of a run kept under this folder."""
    return make_config({"run": {"directory": str(folder), "name": name}}, {})


def test_a_named_run_lies_where_its_settings_say(tmp_path):
    """The folder has the run's name and holds settings that read back the same."""
    config = config_in(tmp_path / "runs", "first")
    directory = RunDirectory(config)
    assert directory.path == tmp_path / "runs" / "first"
    assert load_config(directory.path / "config.toml") == config


def test_a_run_never_writes_over_another(tmp_path):
    """A name that is taken is refused; runs of one second without names get folders apart."""
    RunDirectory(config_in(tmp_path, "first"))
    with pytest.raises(InputError, match=r"run\.name is 'first' but .*first exists"):
        RunDirectory(config_in(tmp_path, "first"))
    paths = {RunDirectory(config_in(tmp_path)).path for _ in range(4)}
    assert len(paths) == 4


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """A file where the folder should be is a mistake of the user's."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the run's folder"):
        RunDirectory(config_in(tmp_path / "file"))


def test_the_log_is_on_disk_at_once(tmp_path):
    """Each entry is a line of JSON that can be read while the run goes on."""
    directory = RunDirectory(config_in(tmp_path, "run"))
    directory.log({"kind": "step", "loss": 1.5})
    directory.log({"kind": "evaluation"})
    lines = (directory.path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["step", "evaluation"]


def test_timelines_are_named_by_their_step(tmp_path):
    """A recorded step is kept in a file that reads back as the same timeline."""
    directory = RunDirectory(config_in(tmp_path, "run"))
    timeline = timeline_from_grid("0F0 0B0")
    directory.write_timeline(25, timeline)
    text = (directory.path / "timelines" / "000025.json").read_text()
    assert timeline_from_json(text) == timeline
