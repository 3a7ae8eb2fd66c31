"""A stage: layers chained by the calling rule."""

from __future__ import annotations

import torch
from torch import nn

from stretto.ir.calling import parameters_of
from stretto.models import Stage


def stage_of(*layers) -> Stage:
    """A stage with these layers, named by their index."""
    return Stage({str(index): layer for index, layer in enumerate(layers)})


def test_layers_hand_over_by_kind():
    """A tuple becomes positional arguments of the next layer, a dict keywords, a list one."""
    stage = stage_of(
        lambda x: (x, 2),
        lambda a, b: {"left": a, "right": b},
        lambda right, left: [left, right],
        lambda both: both,
    )
    assert stage(1) == [1, 2]


def test_extras_reach_the_layers_that_name_them():
    """Every layer that names an extra gets it; the others are called without."""
    stage = stage_of(lambda x: x + 1, lambda x, scale: x * scale, lambda x, *, shift: x + shift)
    assert stage(1, scale=10, shift=5) == 25
    assert stage(1, stage_extras={"scale": 10, "shift": 5}) == 25


def test_keywords_of_the_value_are_not_extras():
    """With extras given apart, a dict from the previous stage reaches the first layer only."""
    stage = stage_of(lambda x, mask: x, lambda x, mask=None: (x, mask))
    assert stage(x=1, mask=2, stage_extras={}) == (1, None)
    assert stage(x=1, stage_extras={"mask": 3}) == (1, 3)


def test_the_rule_gives_a_stage_its_extras_apart():
    """The calling rule sends a stage the value's keywords and the extras separately."""
    stage = stage_of(lambda x, mask: x, lambda x, mask=None: (x, mask))
    args, keywords = parameters_of(stage).arguments({"x": 1, "mask": 2}, {"unused": 3})
    assert stage(*args, **keywords) == (1, None)


def test_a_stage_without_layers_returns_what_it_is_given():
    """One argument, several and keywords come back as the value they stand for."""
    stage = stage_of()
    assert stage(1) == 1
    assert stage(1, 2) == (1, 2)
    assert stage(a=1) == {"a": 1}
    assert stage(1, stage_extras={"mask": 2}) == 1


def test_an_empty_container_is_a_layer():
    """A module of length 0 is found and called like any other."""
    assert stage_of(nn.Sequential(), torch.neg)(torch.ones(2)).tolist() == [-1, -1]


def test_a_replaced_layer_is_the_one_that_runs():
    """Setting a layer by its name, as wrappers do, changes what the stage computes."""
    stage = stage_of(nn.Identity(), nn.Identity())
    setattr(stage, "1", nn.Flatten(0))
    assert stage(torch.zeros(2, 3)).shape == (6,)
