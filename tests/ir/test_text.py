"""Text and CSV: random schedules come back as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import InputError
from stretto.ir import Action, AnyAction, Kind, Overlap, Schedule, StageAction, StageKind
from stretto.ir.files import schedule_from_json, schedule_to_json
from stretto.ir.placement import bidirectional, custom
from stretto.ir.text import format_orders, from_csv, parse_orders, to_csv

KINDS_OF_TORCH = [kind for kind in Kind if kind not in (Kind.FREE_F, Kind.FREE_B)]


def items(num_stages: int, m: int, kinds: list[Kind]) -> st.SearchStrategy[AnyAction]:
    """Any item that can stand in a schedule of this size, sensible there or not."""
    stage, microbatch = st.integers(0, num_stages - 1), st.integers(0, m - 1)
    single = st.builds(Action, stage, st.sampled_from(kinds), microbatch)
    whole = st.builds(StageAction, stage, st.sampled_from(StageKind))
    pair = st.builds(
        lambda left, right, low, back: Overlap(
            Action(left, Kind.F, low), Action(right, back, (low + (left == right)) % m)
        ),
        stage,
        stage,
        microbatch,
        st.sampled_from([Kind.B, Kind.I]),
    )
    return st.one_of(single, whole, pair) if m > 1 else st.one_of(single, whole)


@st.composite
def schedules(draw: st.DrawFn, kinds: list[Kind]) -> Schedule:
    """Every stage is computed on its rank and the last microbatch is there; the rest is free."""
    p = draw(st.integers(1, 4))
    owners = draw(st.permutations([*range(p), *draw(st.lists(st.integers(0, p - 1), max_size=4))]))
    m = draw(st.integers(1, 5))
    orders: list[tuple[AnyAction, ...]] = []
    for rank in range(p):
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        fixed: list[AnyAction] = [Action(stage, Kind.F, m - 1) for stage in own]
        extra = draw(st.lists(items(len(owners), m, kinds), max_size=6))
        computed = [one for one in extra if _stages(one) <= set(own)]
        orders.append(tuple(draw(st.permutations(fixed + computed))))
    return Schedule(placement=custom(owners), num_microbatches=m, ranks=tuple(orders))


def _stages(item: AnyAction) -> set[int]:
    if isinstance(item, Overlap):
        return {item.forward.stage, item.backward.stage}
    return {item.stage}


@given(schedules(KINDS_OF_TORCH))
def test_schedules_survive_text_and_csv(schedule: Schedule) -> None:
    """Placement and number of microbatches are read off the actions."""
    for again in (parse_orders(format_orders(schedule)), from_csv(to_csv(schedule))):
        assert again == schedule
        assert hash(again) == hash(schedule)


@given(schedules(list(Kind)))
def test_schedules_survive_json(schedule: Schedule) -> None:
    """Every kind, frees too, and the placement as it was."""
    again = schedule_from_json(schedule_to_json(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_replicas_survive_json(half: int, m: int, data: st.DataObject) -> None:
    """Which replica a microbatch runs through is part of the value."""
    routes = tuple(data.draw(st.lists(st.integers(0, 1), min_size=m, max_size=m)))
    schedule = Schedule(
        placement=bidirectional(num_ranks=2 * half),
        num_microbatches=m,
        ranks=((),) * (2 * half),
        replica_of_microbatch=routes,
    )
    again = schedule_from_json(schedule_to_json(schedule))
    assert again == schedule
    assert [again.rank_of(0, index) for index in range(m)] == [
        2 * half - 1 if route else 0 for route in routes
    ]


def test_text_is_one_line_per_rank() -> None:
    """White space does not count; a placement can be given, and then owns."""
    assert format_orders(parse_orders("0F0   0B0 \n 1F0\t1B0\n\n")) == "0F0 0B0\n1F0 1B0\n"
    moved = parse_orders("0F0\n", placement=custom([0, 0]))
    assert moved.num_stages == 2
    with pytest.raises(InputError, match="stage 0 is computed on rank 0 too"):
        parse_orders("0F0\n0B0")
    with pytest.raises(InputError, match="holds no action"):
        parse_orders("  \n ")
    with pytest.raises(InputError, match="orders for 1 ranks, its placement has 2"):
        parse_orders("0F0", placement=custom([0, 1]))
