"""The folder of a run: settings, schedule, log, timelines, sample.

config.toml              the settings, ready to run again
schedule.json            what every rank ran
split.txt                which layers were where
log.jsonl                one JSON object per step and per evaluation
timelines/000450.json    what really ran in a step (counted from 1)
costs.json, planned.json the run's own median costs, and the timeline planned with them
sample.txt               the text written at the end
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.errors import InputError
from stretto.ir import Costs, Schedule, Timeline
from stretto.ir.files import costs_to_json, schedule_to_json, timeline_to_json
from stretto.train.config import TrainConfig
from stretto.train.config_file import config_to_toml


class RunDirectory:
    """A run's folder, made anew.

    Args:
        config: Its settings; `run.directory` and `run.name` say where it lies.

    Raises:
        InputError: the folder exists already or cannot be made.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = _make(Path(config.run.directory), config.run.name)
        self._write("config.toml", config_to_toml(config))

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add an object to the log; it is on disk at once."""
        with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def write_schedule(self, schedule: Schedule, split: str) -> None:
        """Keep the schedule and the table of the split."""
        self._write("schedule.json", schedule_to_json(schedule))
        self._write("split.txt", split + "\n")

    def write_timeline(self, step: int, timeline: Timeline) -> None:
        """Keep what ran in a step, counted from 1."""
        self._write(f"timelines/{step:06}.json", timeline_to_json(timeline))

    def write_planned(self, costs: Costs, planned: Timeline) -> None:
        """Keep the costs and the timeline that was planned with them."""
        self._write("costs.json", costs_to_json(costs))
        self._write("planned.json", timeline_to_json(planned))

    def write_sample(self, text: str) -> None:
        """Keep the text written at the end."""
        self._write("sample.txt", text)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _make(parent: Path, name: str) -> Path:
    path = parent / (name or time.strftime("%Y-%m-%d_%H-%M-%S"))
    times = 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if name:
                raise InputError(
                    f"run.name is {name!r} but {path} exists; choose another name or remove it"
                ) from None
            times += 1
            path = parent / f"{path.name.split('~')[0]}~{times}"
        except OSError as error:
            raise InputError(f"cannot make the run's folder {path}: {error.strerror}") from None
        else:
            return path
