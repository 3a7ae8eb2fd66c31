"""Layers per stage: every way of splitting, over many sizes and by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest

from stretto.errors import InputError
from stretto.models.partition import (
    at_class,
    by_class,
    by_starts,
    by_weights,
    counts,
    even,
    layers_per_stage,
    starts,
    uniform_late,
    weighted,
)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (10, 4, (2, 3, 3, 2)),
        (7, 3, (2, 3, 2)),
        (8, 4, (2, 2, 2, 2)),
        (9, 4, (2, 2, 3, 2)),
        (11, 4, (2, 3, 3, 3)),
        (30, 4, (7, 8, 8, 7)),
        (38, 8, (4, 5, 5, 5, 5, 5, 5, 4)),
        (10, 8, (1, 1, 1, 2, 2, 1, 1, 1)),
    ],
)
def test_even_gives_the_remainder_to_the_middle(num_layers, num_stages, expected):
    """Layers left over after even division go one each to the middle stages."""
    assert even(num_layers, num_stages) == expected


def test_uniform_late_gives_the_remainder_to_the_last():
    """Layers left over after even division go one each to the last stages."""
    assert uniform_late(10, 4) == (2, 2, 3, 3)
    assert uniform_late(7, 3) == (2, 2, 3)


@pytest.mark.parametrize("rule", [even, uniform_late])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_uniform_rules_place_every_layer_once(rule, num_stages):
    """Every layer has a place and sizes differ by at most one; too few layers are refused."""
    for num_layers in range(num_stages):
        with pytest.raises(InputError, match=f"^{num_layers} layers .* {num_stages} stages"):
            rule(num_layers, num_stages)
    for num_layers in range(num_stages, 41):
        result = rule(num_layers, num_stages)
        assert len(result) == num_stages
        assert sum(result) == num_layers
        assert max(result) - min(result) <= 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2, 2], r"2 layer counts \[2, 2\] for 3 stages"),
        ([2, 2, 2], "add up to 6; the model has 5 layers"),
        ([6, -1, 0], "stage 1 is given -1 layers"),
    ],
)
def test_counts_are_checked(given, message):
    """Counts of a wrong number, sum or sign are refused with the values."""
    with pytest.raises(InputError, match=message):
        counts(given, 5, 3)


def test_counts_may_leave_a_stage_empty():
    """A stage without layers is made only when its count says so."""
    assert counts([3, 0, 2], 5, 3) == (3, 0, 2)


def test_starts_are_cut_points():
    """Each stage begins at the layer that is given for it."""
    assert starts([0, 3, 4], 6, 3) == (3, 1, 2)


@pytest.mark.parametrize("given", [[1, 3, 4], [0, 4, 3], [0, 3, 7], [0, 3]])
def test_starts_are_checked(given):
    """Starts that do not begin with 0, do not rise, pass the end or are too few are refused."""
    with pytest.raises(InputError, match="starts"):
        starts(given, 6, 3)


def test_class_pattern_divides_the_matches():
    """Stages get as many matching layers each; a stage starts at a match, others stay put."""
    names = ["Embed", "Block", "Norm", "Block", "Block", "Norm", "Block", "Head"]
    assert at_class(names, "Block", 2) == (4, 4)
    assert at_class(names, "Block", 4) == (3, 1, 2, 2)
    assert at_class(names, "Block|Norm", 2) == (4, 4)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_class_pattern_places_every_layer_once(num_stages):
    """With an embedding before and a head after, the blocks are divided as evenly as possible."""
    for num_layers in range(num_stages, 41):
        result = at_class(["Embed", *["Block"] * num_layers, "Head"], "Block", num_stages)
        assert sum(result) == num_layers + 2
        blocks = [count - (i == 0) - (i == num_stages - 1) for i, count in enumerate(result)]
        assert tuple(blocks) == even(num_layers, num_stages)


def test_class_pattern_must_match_enough():
    """Too few matches are refused with their number and the classes there are."""
    with pytest.raises(InputError, match=r"'Blok' matches 0 layers for 2 stages.*Embed, Block"):
        at_class(["Embed", "Block", "Block"], "Blok", 2)
    with pytest.raises(InputError, match="not a regular expression"):
        at_class(["Embed", "Block"], "Block(", 2)


def test_weighted_is_as_light_as_can_be():
    """The heaviest stage is as light as in the best of all splits, tried by brute force."""
    for seed in range(60):
        num_layers = 1 + seed % 8
        weights = [(seed * 7 + 3 * layer * layer) % 11 for layer in range(num_layers)]
        for num_stages in range(1, num_layers + 1):
            best = min(
                max(sum(weights[a:b]) for a, b in zip((0, *cut), (*cut, num_layers), strict=True))
                for cut in combinations(range(1, num_layers), num_stages - 1)
            )
            result = weighted(weights, num_stages)
            assert sum(result) == num_layers
            assert min(result) >= 1
            edges = [sum(result[:stage]) for stage in range(num_stages + 1)]
            heaviest = max(sum(weights[edges[s] : edges[s + 1]]) for s in range(num_stages))
            assert heaviest == best


def test_weighted_is_even_for_equal_weights():
    """Equal weights give sizes that differ by at most one."""
    assert sorted(weighted([1] * 10, 4)) == [2, 2, 3, 3]


def test_weighted_is_exact_for_fractions():
    """Fractions are added without rounding."""
    third = Fraction(1, 3)
    assert weighted([third, third, third, Fraction(1)], 2) == (3, 1)


@pytest.mark.parametrize("weight", [-1, float("nan")])
def test_weighted_refuses_bad_weights(weight):
    """A weight that is negative or not a number is named."""
    with pytest.raises(InputError, match="layer 1 has weight"):
        weighted([1, weight, 1], 2)


def test_every_way_of_splitting_has_a_name():
    """`by` takes names, counts and rules, and checks what a rule returns."""
    names = ["Embed", "Block", "Block", "Block", "Head"]
    assert layers_per_stage("even", names, 2) == (2, 3)
    assert layers_per_stage("uniform_late", names, 2) == (2, 3)
    assert layers_per_stage("class:Block", names, 3) == (2, 1, 2)
    assert layers_per_stage([4, 1], names, 2) == (4, 1)
    assert layers_per_stage(by_starts([0, 4]), names, 2) == (4, 1)
    assert layers_per_stage(by_class("Block"), names, 3) == (2, 1, 2)
    assert layers_per_stage(by_weights([0, 1, 1, 1, 3]), names, 2) == (4, 1)
    with pytest.raises(InputError, match="split by 'evn' is unknown"):
        layers_per_stage("evn", names, 2)
    with pytest.raises(InputError, match="add up to 2"):
        layers_per_stage(lambda _names, _stages: (1, 1), names, 2)
    with pytest.raises(InputError, match="2 weights for 5 layers"):
        layers_per_stage(by_weights([1, 1]), names, 2)
