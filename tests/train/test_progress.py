"""What a run shows while it goes."""

from __future__ import annotations

import io

from rich.console import Console

from stretto.train.progress import Status, open_display

STATUS = Status(loss=2.5, held_out_loss=2.75, tokens_per_s=17123.4, bubbles=(0.123, 0.456))


def shown(*, is_terminal: bool) -> str:
    """What two updates and a milestone between them leave behind."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=120)
    display = open_display(console, 100)
    display.update(9, "ninth")
    display.milestone(10, "tenth")
    display.update(11, "eleventh")
    display.close()
    return file.getvalue()


def test_a_status_has_the_figures():
    """Losses, characters per second, and both bubbles; without a recorded step no bubble."""
    assert str(STATUS) == (
        "loss 2.500  held-out 2.750  17,123 tokens/s  bubble 12% planned, 46% measured"
    )
    plain = Status(loss=2.5, held_out_loss=2.75, tokens_per_s=1.0, bubbles=None)
    assert str(plain).endswith("bubble -")


def test_off_a_terminal_milestones_are_plain_lines():
    """What is written to a file has one line per milestone and no control characters."""
    assert shown(is_terminal=False) == "step  10/100  tenth\n"


def test_on_a_terminal_there_is_a_live_line():
    """Every update is drawn, milestones stay, and the cursor comes back at the end."""
    output = shown(is_terminal=True)
    assert "ninth" in output
    assert "step  10/100  tenth" in output
    assert "11/100" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
