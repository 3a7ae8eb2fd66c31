"""What a run shows while it goes: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a run is, between two steps.

    Args:
        loss: Loss of the last step, in nats per character.
        held_out_loss: Loss of the last evaluation.
        tokens_per_s: Characters learned from per second, over the last steps.
        bubbles: Bubble fraction of the plan with the run's own costs, and of the last recorded
            step; None before the first of them.
    """

    loss: float
    held_out_loss: float
    tokens_per_s: float
    bubbles: tuple[float, float] | None

    def __str__(self) -> str:
        bubbles = "-"
        if self.bubbles is not None:
            bubbles = "{:.0%} planned, {:.0%} measured".format(*self.bubbles)
        return (
            f"loss {self.loss:.3f}  held-out {self.held_out_loss:.3f}  "
            f"{self.tokens_per_s:,.0f} tokens/s  bubble {bubbles}"
        )


class Display(Protocol):
    """Something that shows how a run goes on."""

    def update(self, step: int, status: str) -> None:
        """Show the status after so many steps, until the next."""
        ...

    def milestone(self, step: int, status: str) -> None:
        """Show a status that stays."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def open_display(console: Console, num_steps: int) -> Display:
    """A live line if the console is a terminal, else a line per milestone."""
    return (LiveLine if console.is_terminal else PlainLines)(console, num_steps)


class PlainLines:
    """One line per milestone."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps

    def update(self, step: int, status: str) -> None:
        """Show nothing."""

    def milestone(self, step: int, status: str) -> None:
        """Print a line."""
        width = len(str(self._num_steps))
        line = f"step {step:{width}}/{self._num_steps}  {status}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""


class LiveLine(PlainLines):
    """A progress bar with the status after it; milestones are printed above."""

    def __init__(self, console: Console, num_steps: int) -> None:
        super().__init__(console, num_steps)
        # Refreshed by `update` alone: a thread that refreshes would take time from the ranks.
        self._progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", total=num_steps)
        self._progress.start()

    def update(self, step: int, status: str) -> None:
        """Redraw the line."""
        self._progress.update(self._task, completed=step, description=status, refresh=True)

    def close(self) -> None:
        """Take the line away."""
        self._progress.stop()


def show_cursor(console: Console) -> None:
    """Bring the cursor back after a rank with a live line was ended by force."""
    if console.is_terminal:
        console.show_cursor(True)
