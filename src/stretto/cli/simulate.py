"""`stretto simulate`: the exact figures of a schedule under given costs."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from stretto.cli.options import make_costs, make_schedule


def simulate(
    name: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    unit_costs: str | None = None,
    costs: str | None = None,
    latency: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Print makespan, longest rank span, bubble, peak per rank and a lower bound.

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
    as_json
        Write the figures as JSON.
    """
    from stretto.ir import bubble_fraction, makespan, max_rank_span, peak_memory
    from stretto.simulate import lower_bound
    from stretto.simulate import simulate as run
    from stretto.view import summarise, write_number

    schedule = make_schedule(name, ranks, microbatches, stages_per_rank)
    made = make_costs(schedule.num_stages, unit_costs, costs, latency)
    timeline = run(schedule, made)
    bound = lower_bound(schedule, made)
    if as_json:
        figures = {
            "makespan": float(makespan(timeline)),
            "max_rank_span": float(max_rank_span(timeline)),
            "bubble_fraction": float(bubble_fraction(timeline)),
            "peak_memory": [float(peak) for peak in peak_memory(timeline)],
            "lower_bound": float(bound),
        }
        print(json.dumps(figures, indent=1))
    else:
        print(f"{summarise(timeline)}, lower bound {write_number(bound)}")
