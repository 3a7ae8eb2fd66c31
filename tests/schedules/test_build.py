"""Generators by name, and the drawings in their docstrings."""

from __future__ import annotations

import inspect
import re

import pytest

from stretto import schedules
from stretto.errors import InputError
from stretto.ir import compute_spans, timeline_from_grid, uniform_costs
from stretto.schedules import GENERATORS, build
from stretto.simulate import simulate


@pytest.mark.parametrize("name", GENERATORS)
def test_the_drawing_in_the_docstring_is_the_schedule(name: str) -> None:
    """The grid shows the very actions in the very slots in which they run, F and B equally long."""
    text = " ".join((inspect.getdoc(GENERATORS[name]) or "").split())
    rows = re.findall(r"rank \d+\s+(.*)", inspect.getdoc(GENERATORS[name]) or "")
    drawn = timeline_from_grid(*rows)
    sizes = {"num_ranks": "p", "num_microbatches": "m", "stages_per_rank": "v"}
    told = {
        option: int(re.findall(rf"\b{letter} = (\d+)", text)[0])
        for option, letter in sizes.items()
        if option in inspect.signature(GENERATORS[name]).parameters
    }
    schedule = build(name, **told)
    costs = uniform_costs(schedule.num_stages, forward_s=1, input_s=1, weight_s=0)
    assert compute_spans(drawn) == compute_spans(simulate(schedule, costs))


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_called_by_their_own_name(name: str) -> None:
    """The name in the table is the function's, and the package exports it."""
    assert GENERATORS[name].__name__ == name
    assert getattr(schedules, name) is GENERATORS[name]
    assert name in schedules.__all__


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpip", "gpipe"),
        ("GPipe", "gpipe"),
        ("1f1b", "one_f_one_b"),
        ("1F1B", "one_f_one_b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
    ],
)
def test_unknown_names_are_answered_with_the_one_that_was_meant(name: str, meant: str) -> None:
    """Other spellings are told the name, and every name there is."""
    with pytest.raises(InputError, match=f"no schedule is called '{name}'") as caught:
        build(name, num_ranks=2, num_microbatches=2)
    assert f"did you mean {meant!r}?" in str(caught.value)
    assert all(known in str(caught.value) for known in GENERATORS)


def test_a_name_like_no_other_gets_no_guess() -> None:
    """The names there are still follow."""
    with pytest.raises(InputError, match=r"'qqq'; known: gpipe, one_f_one_b"):
        build("qqq", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("gpipe", {"stages_per_rank": 2}, "leave it out, or take interleaved_1f1b or looped_bfs"),
        ("gpipe", {"colour": 2}, r"takes no colour \(it is 2\); no schedule takes it"),
        ("looped_bfs", {}, "looped_bfs needs stages_per_rank"),
        ("looped_bfs", {"stages_per_rank": 0}, "looped_bfs: stages_per_rank is 0; it must be"),
        ("looped_bfs", {"stages_per_rank": 2.0}, "stages_per_rank is 2.0; it must be a whole"),
        ("looped_bfs", {"stages_per_rank": True}, "stages_per_rank is True; it must be a whole"),
        ("looped_bfs", {"stages_per_rank": "2"}, "stages_per_rank is '2'; it must be a whole"),
        ("interleaved_1f1b", {"stages_per_rank": 1}, "one_f_one_b is the schedule for one stage"),
    ],
)
def test_options_that_do_not_suit_are_told(name: str, options: dict, told: str) -> None:
    """One line with the value, the rule and what would do."""
    with pytest.raises(InputError, match=told) as caught:
        build(name, num_ranks=2, num_microbatches=2, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("size", ["num_ranks", "num_microbatches"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_1_are_told(name: str, size: str, value: int) -> None:
    """Generator, size and value are named, whether built by name or called."""
    sizes = {"num_ranks": 2, "num_microbatches": 2, size: value}
    if "stages_per_rank" in inspect.signature(GENERATORS[name]).parameters:
        sizes["stages_per_rank"] = 2
    with pytest.raises(InputError, match=f"{name}: {size} is {value}; it must be a whole number"):
        GENERATORS[name](**sizes)
