"""`stretto show`: draw a schedule, or write it."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from stretto.cli.options import Wanted


def show(
    name: str,
    *,
    wanted: Wanted | None = None,
    form: Annotated[Literal["text", "csv", "json"], Parameter(name="--format")] = "text",
) -> None:
    """Draw a schedule with its figures, or write it as a file.

    Parameters
    ----------
    name
        A generator (gpipe, one_f_one_b, interleaved_1f1b, looped_bfs) or a .csv or .json file.
    wanted
        Sizes and costs.
    form
        text draws; csv (in torch's spelling) and json write the schedule.
    """
    wanted = Wanted() if wanted is None else wanted
    schedule = wanted.schedule(name)
    if form == "csv":
        from stretto.ir.text import to_csv

        sys.stdout.write(to_csv(schedule))
    elif form == "json":
        from stretto.ir.files import schedule_to_json

        sys.stdout.write(schedule_to_json(schedule))
    else:
        from stretto.simulate import simulate
        from stretto.view import draw_timeline, summarise

        timeline = simulate(schedule, wanted.costs_of(schedule))
        print(draw_timeline(timeline, colour=sys.stdout.isatty()))
        print(summarise(timeline))
