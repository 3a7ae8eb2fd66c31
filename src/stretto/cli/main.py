"""From words to a verb, and from errors to an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError

import stretto
from stretto.cli import check, show, simulate, train
from stretto.errors import InputError, ScheduleError, StrettoError

GOOD, NOT_GOOD, UNUSABLE, FAILED = 0, 1, 2, 3

HELP = "Pipeline-parallel training for PyTorch in which the schedule is data."


def make_app() -> App:
    """The verbs and their options."""
    app = App(
        name="stretto",
        help=HELP,
        version=stretto.__version__,
        suppress_keyboard_interrupt=False,
    )
    for verb in (show.show, check.check, simulate.simulate, train.train):
        app.command(verb)
    return app


def run(words: Sequence[str]) -> int:
    """Run a command line.

    Args:
        words: What follows the program's name.

    Returns:
        The exit status.
    """
    try:
        if words and words[0] == "train":
            words = train.gather_settings(words)
        status = make_app()(
            words, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
        return GOOD if status is None else int(status)
    except (CycloptsError, InputError) as error:
        return _tell(error, UNUSABLE)
    except ScheduleError as error:
        return _tell(error, NOT_GOOD)
    except StrettoError as error:
        return _tell(error, FAILED)
    except KeyboardInterrupt:
        print("stretto: interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # the reader left (show | head): nothing to tell, and nothing more to write on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD


def _tell(error: Exception, status: int) -> int:
    text = " ".join(str(error).split()) if status == UNUSABLE else str(error)
    print(f"stretto: {text}", file=sys.stderr)
    return status


def main() -> NoReturn:
    """The `stretto` program."""
    sys.exit(run(sys.argv[1:]))
