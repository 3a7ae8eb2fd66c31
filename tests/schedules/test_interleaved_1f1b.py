"""Interleaved 1F1B: the published formula, and the order for any number of microbatches."""

from __future__ import annotations

import inspect
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.ir import Action, Kind, Number, Schedule, makespan, uniform_costs
from stretto.schedules import interleaved_1f1b
from stretto.schedules.interleaved_1f1b import even_groups
from stretto.simulate import simulate
from stretto.verify import peak_memory, verify


def most_held(p: int, v: int, rank: int) -> int:
    """The published warmup and one more: what a rank may hold in stage activations."""
    return 2 * (p - rank - 1) + (v - 1) * p + 1


def short_last_group(p: int, v: int, m: int) -> Schedule:
    """The published formula as it stands, for any m: its last group of microbatches is short."""
    template = interleaved_1f1b(num_ranks=p, stages_per_rank=v, num_microbatches=p)
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    orders: list[tuple[Action, ...]] = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [Action(s, Kind.F, i) for group in groups for s in stages for i in group]
        backwards = [Action(s, Kind.B, i) for group in groups for s in stages[::-1] for i in group]
        warmup = min(most_held(p, v, rank) - 1, m * v)
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        orders.append((*order, *backwards[m * v - warmup :]))
    return Schedule(placement=template.placement, num_microbatches=m, ranks=tuple(orders))


def bound(p: int, v: int, m: int) -> int:
    """No order is shorter, with F = 1 and B = 2 in a stage: a full rank, or the pass of all."""
    return 3 * max(m * v + p - 1, p * v + m - 1)


def seconds(schedule: Schedule) -> Number:
    """The makespan where F takes 1 and B takes 2."""
    costs = uniform_costs(schedule.num_stages, forward_s=1, input_s=1, weight_s=1)
    return makespan(simulate(schedule, costs))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (8, 2, 8), (1, 3, 4)])
def test_the_order_is_the_published_one_where_p_divides_m(p: int, v: int, m: int) -> None:
    """Forward i is of local stage (i mod pv) div p, backward i of the mirrored one."""
    schedule = interleaved_1f1b(num_ranks=p, stages_per_rank=v, num_microbatches=m)
    for rank, order in enumerate(schedule.ranks):
        single = [item for item in order if isinstance(item, Action)]
        chunks = {
            kind: [item.stage // p for item in single if item.kind is kind]
            for kind in (Kind.F, Kind.B)
        }
        assert chunks[Kind.F] == [(i % (p * v)) // p for i in range(m * v)]
        assert chunks[Kind.B] == [v - 1 - (i % (p * v)) // p for i in range(m * v)]
        warmup = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        phases = "F" * warmup + "FB" * (m * v - warmup) + "B" * warmup
        assert "".join(item.kind.value for item in single) == phases


def test_an_uneven_number_of_microbatches_drawn() -> None:
    """p = 2, m = 3: groups of 2 and 1; the makespan is the bound, 21."""
    schedule = interleaved_1f1b(num_ranks=2, stages_per_rank=2, num_microbatches=3)
    # F and B drawn equally long
    assert grid_orders(
        "0F0 0F1 2F0 2F1 0F2 2B0  .  2B1 2F2 0B0  .  2B2 0B1 0B2",
        " .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3F2 3B2 1B1 1B2  . ",
    ) == [[str(item) for item in order] for order in schedule.ranks]
    assert seconds(schedule) == bound(2, 2, 3) == 21


def grid_orders(*rows: str) -> list[list[str]]:
    """The words of a drawing, without its holes."""
    return [[word for word in row.split() if word != "."] for row in rows]


def test_the_table_in_the_docstring_is_true() -> None:
    """Makespans of the formula, of the generator and of the bound, at p = 4 and v = 2."""
    table: dict[str, list[int]] = {}
    for line in (inspect.getdoc(interleaved_1f1b) or "").splitlines():
        for title in ("m", "short last group", "this generator", "lower bound"):
            numbers = line.strip().removeprefix(title).split()
            if line.strip().startswith(title + " ") and all(one.isdigit() for one in numbers):
                table[title] = [int(one) for one in numbers]
    assert table["m"] == [5, 6, 7, 9, 10, 11, 13, 14]
    for index, m in enumerate(table["m"]):
        ours = interleaved_1f1b(num_ranks=4, stages_per_rank=2, num_microbatches=m)
        assert table["this generator"][index] == seconds(ours)
        assert table["short last group"][index] == seconds(short_last_group(4, 2, m))
        assert table["lower bound"][index] == bound(4, 2, m)


def test_the_formula_with_a_short_last_group_can_deadlock() -> None:
    """Why it is not used: at p = 4, v = 3, m = 9 it hangs even when sends are buffered."""
    assert verify(short_last_group(4, 3, 9), transport="buffered") != ()
    ours = interleaved_1f1b(num_ranks=4, stages_per_rank=3, num_microbatches=9)
    assert verify(ours) == ()


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_any_number_of_microbatches_is_near_the_bound(p: int) -> None:
    """Proved, no slower than the formula, in its memory, at most 4.6 % above the bound."""
    for v, m in product((2, 3), range(1, 3 * p + 2)):
        check_size(p, v, m)


@pytest.mark.sweep
def test_any_number_of_microbatches_is_near_the_bound_for_many_sizes() -> None:
    """The figures of the docstring, over all sizes it names; most are at the bound."""
    sizes = list(product(range(2, 9), (2, 3, 4), range(1, 34)))
    at_bound = [check_size(*size) for size in sizes]
    assert (sum(at_bound), len(sizes)) == (681, 693)


def check_size(p: int, v: int, m: int) -> bool:
    """Assert what is promised for every size; whether the makespan is the bound."""
    schedule = interleaved_1f1b(num_ranks=p, stages_per_rank=v, num_microbatches=m)
    assert verify(schedule) == (), (p, v, m)
    formula = short_last_group(p, v, m)
    ours = seconds(schedule)
    if not verify(formula, transport="buffered"):
        assert ours <= seconds(formula), (p, v, m)
    assert bound(p, v, m) <= ours <= Fraction(1046, 1000) * bound(p, v, m), (p, v, m)
    for rank, held in enumerate(peak_memory(schedule)):
        assert held <= min(most_held(p, v, rank), m * v), (p, v, m, rank)
    return ours == bound(p, v, m)


@given(st.integers(1, 500), st.integers(1, 40))
def test_groups_are_even_and_in_order(m: int, largest: int) -> None:
    """The fewest groups that fit, no two sizes more than one apart, the longer ones first."""
    groups = even_groups(m, largest)
    assert [index for group in groups for index in group] == list(range(m))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] <= largest
    assert len(groups) == -(-m // largest)
