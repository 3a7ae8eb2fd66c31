"""Orders found by running: who is free takes what has arrived."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stretto.ir import Action, Kind, Schedule, order_by_arrival
from stretto.ir.arrival import HasArrived, Pick
from stretto.ir.placement import custom
from stretto.ir.text import format_orders
from stretto.ir.walk import walk


def wishes(stage: int, kinds: str, m: int) -> list[Action]:
    """All actions of a stage, one kind after the other."""
    return [Action(stage, Kind(kind), microbatch) for kind in kinds for microbatch in range(m)]


def first_arrived(wish_list: Sequence[Action]) -> Pick:
    """Takes the first of these actions that has arrived and has not run."""
    left = list(wish_list)

    def pick(has_arrived: HasArrived) -> Action | None:
        chosen = next(filter(has_arrived, left), None)
        if chosen is not None:
            left.remove(chosen)
        return chosen

    return pick


def orders_of(*wish_lists: list[Action]) -> list[str]:
    """The orders that come of one wish list per rank, stage s on rank s."""
    ranks = order_by_arrival([first_arrived(each) for each in wish_lists], len(wish_lists))
    placement = custom(range(len(wish_lists)))
    schedule = Schedule(placement=placement, num_microbatches=4, ranks=ranks)
    return format_orders(schedule).splitlines()


def test_a_free_rank_takes_its_first_wish_that_has_arrived() -> None:
    """Backwards first, forwards while no gradient is there; B lasts two units, F one."""
    # time   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14
    #       0F0 0F1 0F2 0F3 0B0  "   .  0B1  "   .  0B2  "   .  0B3  "
    #        .  1F0 1B0  "  1F1 1B1  "  1F2 1B2  "  1F3 1B3  "
    assert orders_of(wishes(0, "BF", 4), wishes(1, "BF", 4)) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert orders_of(wishes(0, "BF", 4), wishes(1, "FB", 4)) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3",
    ]


def test_the_clock_decides_who_comes_first() -> None:
    """Input gradients last half as long as whole backwards, so they come back earlier."""
    # time   0   1   2   3   4            0   1   2   3   4
    #       0F0 0F1 0F2 0I0 ...          0F0 0F1 0F2 0F3 0B0
    #        .  1F0 1I0 1W0 ...           .  1F0 1B0  "
    assert orders_of(wishes(0, "IFW", 4), wishes(1, "IWF", 4))[0].split()[3] == "0I0"
    assert orders_of(wishes(0, "BF", 4), wishes(1, "BF", 4))[0].split()[3] == "0F3"


def test_the_run_ends_when_nobody_picks() -> None:
    """Work that never arrives is left out; the caller sees it missing."""
    assert orders_of(wishes(0, "F", 2), wishes(1, "FB", 3)) == ["0F0 0F1", "1F0 1F1 1B0 1B1"]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_whatever_the_picks_the_orders_fit_together(
    number: int, p: int, m: int, more_stages: int
) -> None:
    """Any wish lists on any placement give complete orders that nobody waits in for ever."""
    draw = random.Random(number)
    owners = [*range(p), *(draw.randrange(p) for _ in range(more_stages))]
    draw.shuffle(owners)
    lists: list[list[Action]] = [[] for _ in range(p)]
    for stage, rank in enumerate(owners):
        lists[rank] += wishes(stage, draw.choice(["FB", "FIW"]), m)
    for each in lists:
        draw.shuffle(each)
    ranks = order_by_arrival([first_arrived(each) for each in lists], len(owners))
    assert [sorted(map(str, order)) for order in ranks] == [sorted(map(str, e)) for e in lists]
    schedule = Schedule(placement=custom(owners), num_microbatches=m, ranks=ranks)
    assert walk(schedule).blocked == ()
