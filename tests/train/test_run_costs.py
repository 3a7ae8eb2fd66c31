"""Costs that a run's own timelines give."""

from __future__ import annotations

import pytest

from stretto.errors import EmptyTimelineError
from stretto.ir import timeline_from_grid
from stretto.train.run_costs import median_costs


def test_costs_are_medians_over_microbatches_and_steps():
    """A stage's cost is the middle of what its actions took, so one slow one does not count."""
    steps = [
        timeline_from_grid("0F0 0F1 0F1 0B0 0B0 0B1 0B1"),
        timeline_from_grid("0F0 0F1 0F1 0F1 0F1 0F1 0B0 0B1 0B1"),
        timeline_from_grid("0F0 0B0 0B0"),
    ]
    costs = median_costs(steps, 1)
    assert costs.forward_s == (1.0,)
    assert costs.input_s == costs.weight_s == (1.0,)


def test_split_backwards_have_costs_of_their_own():
    """Where I and W were recorded they are the costs; each stage by itself."""
    timeline = timeline_from_grid(
        "0F0  .   .  0I0 0I0 0W0",
        " .  1F0 1B0  .   .   . ",
    )
    costs = median_costs([timeline], 2)
    assert costs.input_s == (2.0, 0.5)
    assert costs.weight_s == (1.0, 0.5)


@pytest.mark.parametrize("row", ["0F0", "0B0", "0F0 0I0", "1F0 1B0"])
def test_a_stage_without_work_is_named(row):
    """Timelines that lack a stage's forward or backward give no costs."""
    with pytest.raises(EmptyTimelineError, match="stage 0"):
        median_costs([timeline_from_grid(row)], 1)
