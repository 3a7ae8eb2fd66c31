"""The forward part of schedules: complete, free of waits in a circle, and without needless ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import InputError
from stretto.ir import Costs, Placement, Schedule, makespan
from stretto.ir.placement import bidirectional, custom, loop, v, wave
from stretto.ir.text import format_orders
from stretto.passes import forward_part
from stretto.schedules import build
from stretto.simulate import simulate
from stretto.verify import verify


def forwards(placement: Placement, m: int) -> Schedule:
    """The forward part of some schedule on this placement."""
    training = Schedule(placement=placement, num_microbatches=1, ranks=((),) * placement.num_ranks)
    return forward_part(training, m)


def seconds(schedule: Schedule) -> object:
    """The time it takes where every F lasts one second."""
    ones = (1,) * schedule.num_stages
    return makespan(simulate(schedule, Costs(forward_s=ones, input_s=ones, weight_s=ones)))


def rows(schedule: Schedule) -> list[str]:
    """One line of printed actions per rank."""
    return format_orders(schedule).splitlines()


def test_on_a_loop_microbatches_go_round_in_groups_of_ranks() -> None:
    """Groups of p pass one stage before the next; a short last group runs its own number."""
    schedule = build("interleaved_1f1b", num_ranks=2, num_microbatches=4, stages_per_rank=2)
    assert rows(forward_part(schedule)) == [
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    ]
    assert rows(forward_part(schedule, 3)) == [
        "0F0 0F1 2F0 2F1 0F2 2F2",
        "1F0 1F1 3F0 3F1 1F2 3F2",
    ]


def test_on_a_v_new_microbatches_fill_the_time_until_the_first_comes_back() -> None:
    """The rank of the turn alternates; the others take what comes back as soon as it is there."""
    assert rows(forwards(v(num_ranks=2), 4)) == [
        "0F0 0F1 0F2 3F0 0F3 3F1 3F2 3F3",
        "1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3",
    ]


def test_two_replicas_share_the_microbatches() -> None:
    """They take turns, and each rank runs whichever end has work."""
    schedule = forwards(bidirectional(num_ranks=2), 4)
    assert schedule.replica_of_microbatch == (0, 1, 0, 1)
    assert rows(schedule) == ["0F0 1F1 0F2 1F3", "0F1 1F0 0F3 1F2"]


@pytest.mark.parametrize("m", [1, 2, 4, 7, 8, 12, 31])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_times_are_those_of_full_ranks(p: int, m: int) -> None:
    """The line is never idle once filled; nor is the last rank of a V; a loop where p divides m."""
    assert seconds(forwards(loop(num_ranks=p), m)) == m + p - 1
    for stages in (2, 3):
        last = (m - 1) % p + 1  # a last group of this many waits for its first to come round
        expected = (m - last) * stages + p * stages + last - 1
        assert seconds(forwards(loop(num_ranks=p, stages_per_rank=stages), m)) == expected
    assert seconds(forwards(v(num_ranks=p), m)) == 2 * m + 2 * p - 2


@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_any_placement_is_proved_and_runs_each_forward_once(
    p: int, m: int, data: st.DataObject
) -> None:
    """Loop, wave, two replicas or any map; verified under every rule of sending."""
    more = st.lists(st.integers(0, p - 1), max_size=4)
    placement = data.draw(
        st.one_of(
            st.just(wave(num_ranks=p, num_waves=2)),
            st.just(bidirectional(num_ranks=2 * p)),
            more.flatmap(lambda extra: st.permutations([*range(p), *extra])).map(custom),
        )
    )
    schedule = forwards(placement, m)
    assert verify(schedule) == ()
    ran = [str(item) for order in schedule.ranks for item in order]
    every = [f"{stage}F{index}" for stage in range(schedule.num_stages) for index in range(m)]
    assert sorted(ran) == sorted(every)


def test_an_evaluation_needs_a_microbatch() -> None:
    """The message has the number."""
    with pytest.raises(InputError, match="num_microbatches is 0; an evaluation needs at least 1"):
        forward_part(build("gpipe", num_ranks=2, num_microbatches=2), 0)
