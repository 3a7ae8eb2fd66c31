"""What is kept and shown of a run, by one of its ranks: log, timelines, plan, live line.

The plan beside a measurement is the schedule simulated with the run's own median costs, so their
difference is what messages, the engine and shared cores cost.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from stretto.ir import Costs, Timeline, bubble_fraction
from stretto.simulate import simulate
from stretto.train.job import Job
from stretto.train.loop import Evaluated, Event, Stepped, Wrote
from stretto.train.progress import Status, open_display
from stretto.train.run_costs import median_costs
from stretto.train.run_directory import RunDirectory

Draw = Callable[[Timeline, Timeline], str]
"""Draws a planned timeline over a measured one."""

RECENT = 20
"""Steps that the rate, and recorded timelines that the costs are taken from."""


class Journal:
    """Writes a run's events into its folder and shows them.

    Args:
        job: The run.
        directory: Its folder.
        console: Where to show it.
        draw: How timelines are drawn at the end.
        is_one_host: Whether all ranks run on this host.
    """

    def __init__(
        self, job: Job, directory: RunDirectory, console: Console, draw: Draw, *, is_one_host: bool
    ) -> None:
        self._job = job
        self._directory = directory
        self._console = console
        self._draw = draw
        self._is_one_host = is_one_host
        self._display = open_display(console, job.config.run.steps)
        self._held_out_losses: list[float] = []
        self._last_loss = float("nan")
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._timelines: deque[Timeline] = deque(maxlen=RECENT)
        self._plan: tuple[Costs, Timeline] | None = None
        self._sample: str | None = None
        self._last_event_s = time.perf_counter()
        self._training_s = 0.0
        directory.write_schedule(job.schedule, job.split)

    def take(self, event: Event) -> None:
        """Keep and show an event."""
        now = time.perf_counter()
        seconds, self._last_event_s = now - self._last_event_s, now
        match event:
            case Evaluated():
                self._evaluated(event)
            case Stepped():
                self._stepped(event, seconds)
            case Wrote():
                self._sample = event.text
                self._directory.write_sample(event.text)

    def close(self) -> None:
        """Take the live line away."""
        self._display.close()

    def conclude(self) -> None:
        """Show what came of it: losses, sample, the last recorded step under its plan."""
        first, last = self._held_out_losses[0], self._held_out_losses[-1]
        steps = self._job.config.run.steps
        self._print(
            f"held-out loss {first:.3f} -> {last:.3f} nats per character "
            f"in {steps} steps, {self._training_s:.0f} s of training"
        )
        if self._sample is not None:
            self._print(f"\n--- sample ---\n{self._sample.strip()}\n--------------")
        if self._plan is not None:
            costs, planned = self._plan
            self._directory.write_planned(costs, planned)
            self._print(f"\n{self._draw(planned, self._timelines[-1])}")
        self._print(self._about_cores())
        self._print(f"run kept in {self._directory.path}")

    def _evaluated(self, event: Evaluated) -> None:
        self._held_out_losses.append(event.held_out_loss)
        self._directory.log({"kind": "evaluation", **asdict(event)})
        if event.step:
            self._display.milestone(event.step, str(self._status()))
        else:
            self._display.milestone(0, f"held-out {event.held_out_loss:.3f}")

    def _stepped(self, event: Stepped, seconds: float) -> None:
        self._training_s += seconds
        self._step_seconds.append(seconds)
        self._last_loss = event.loss
        entry: dict[str, Any] = {
            "kind": "step",
            "step": event.step,
            "loss": event.loss,
            "gradient_norm": event.gradient_norm,
            "learning_rate": event.learning_rate,
            "seconds": seconds,
        }
        if event.timeline is not None:
            self._directory.write_timeline(event.step, event.timeline)
            self._timelines.append(event.timeline)
            costs = median_costs(self._timelines, self._job.schedule.num_stages)
            self._plan = costs, simulate(self._job.schedule, costs)
            entry["bubble_planned"], entry["bubble_measured"] = self._bubbles() or (None, None)
        self._directory.log(entry)
        self._display.update(event.step, str(self._status()))

    def _status(self) -> Status:
        config = self._job.config
        tokens = config.data.batch_size * config.model.context
        return Status(
            loss=self._last_loss,
            held_out_loss=self._held_out_losses[-1],
            tokens_per_s=tokens * len(self._step_seconds) / sum(self._step_seconds),
            bubbles=self._bubbles(),
        )

    def _bubbles(self) -> tuple[float, float] | None:
        if self._plan is None:
            return None
        planned, measured = self._plan[1], self._timelines[-1]
        return float(bubble_fraction(planned)), float(bubble_fraction(measured))

    def _about_cores(self) -> str:
        ranks, cores = self._job.schedule.num_ranks, _num_cores()
        if not self._is_one_host or ranks <= cores:
            return ""
        return (
            f"{ranks} ranks shared {cores} {'core' if cores == 1 else 'cores'}: actions that the "
            "plan runs side by side took turns, so the measured step is longer."
        )

    def _print(self, text: str) -> None:
        if text:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
