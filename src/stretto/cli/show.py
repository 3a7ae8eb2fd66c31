"""`stretto show`: draw a schedule, or write it."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from stretto.cli.options import make_costs, make_schedule


def show(
    name: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    unit_costs: str | None = None,
    costs: str | None = None,
    latency: str | None = None,
    format: Annotated[Literal["text", "csv", "json"], Parameter(name="--format")] = "text",
) -> None:
    """Draw a schedule with its figures, or write it as a file.

    Parameters
    ----------
    name
        A generator (gpipe, one_f_one_b, interleaved_1f1b, looped_bfs) or a .csv or .json file.
    ranks
        Number of ranks.
    microbatches
        Number of microbatches.
    stages_per_rank
        Stages on each rank, for generators that take it.
    unit_costs
        Costs of every stage as F,I,W; 1,1,1 if not given, so B is 2.
    costs
        A file of costs.
    latency
        Time of every hop between ranks.
    format
        text draws; csv (in torch's spelling) and json write the schedule.
    """
    schedule = make_schedule(name, ranks, microbatches, stages_per_rank)
    if format == "csv":
        from stretto.ir.text import to_csv

        sys.stdout.write(to_csv(schedule))
    elif format == "json":
        from stretto.ir.files import schedule_to_json

        sys.stdout.write(schedule_to_json(schedule))
    else:
        from stretto.simulate import simulate
        from stretto.view import draw_timeline, summarise

        timeline = simulate(schedule, make_costs(schedule.num_stages, unit_costs, costs, latency))
        print(draw_timeline(timeline, colour=sys.stdout.isatty()))
        print(summarise(timeline))
