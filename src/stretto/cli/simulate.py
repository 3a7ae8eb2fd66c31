"""`stretto simulate`: the exact figures of a schedule under given costs."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from stretto.cli.options import Wanted


def simulate(
    name: str,
    *,
    wanted: Wanted | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Print makespan, longest rank span, bubble, peak per rank and a lower bound.

    Parameters
    ----------
    name
        A generator (gpipe, one_f_one_b, interleaved_1f1b, looped_bfs) or a .csv or .json file.
    wanted
        Sizes and costs.
    as_json
        Write the figures as JSON.
    """
    from stretto.ir import bubble_fraction, makespan, max_rank_span, peak_memory
    from stretto.simulate import lower_bound
    from stretto.simulate import simulate as run
    from stretto.view import summarise, write_number

    wanted = Wanted() if wanted is None else wanted
    schedule = wanted.schedule(name)
    costs = wanted.costs_of(schedule)
    timeline = run(schedule, costs)
    bound = lower_bound(schedule, costs)
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
