"""Proof for channels that share communicators: what hangs is found, what is lowered ends."""

from __future__ import annotations

import pytest

from every_schedule import every_schedule, generated
from stretto.ir import Communicators, Schedule, compute_only
from stretto.ir.placement import loop
from stretto.ir.text import parse_orders
from stretto.passes import lower
from stretto.schedules import build
from stretto.verify import Rule, Transport, find_deadlock, lower_for, verify
from stretto.verify.deadlock import deadlock_violations


def test_two_ranks_that_both_send_first_hang_on_one_communicator() -> None:
    """Neither reaches its receive's turn; the circle says who holds the queue and who is behind."""
    program = parse_orders(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        placement=loop(num_ranks=2),
    )
    for name in ("per_channel", "per_direction"):
        assert verify(program, transport="nccl", communicators=name, batched=False) == ()
    # as one batch each, sends and receives of both ranks go at the same time
    assert verify(program, transport="nccl", communicators="shared") == ()
    (told,) = verify(program, transport="nccl", communicators="shared", batched=False)
    assert (told.rule, told.rank, told.position, told.action) == (Rule.DEADLOCK, 0, 5, "0B0")
    assert str(told).splitlines() == [
        "rank 0, position 5 of the lowered program: 0B0 waits for ever "
        "(sends nccl, communicators shared, one by one)",
        "  rule: no ranks wait for each other in a circle",
        "  rank 0 is at position 5, 0B0, and waits for the gradient of stage 1's input for "
        "microbatch 0: 0RECV_B0 (position 4) is behind 0SEND_F1 (position 3), the head of "
        "communicator all on rank 0",
        "  rank 1 is at position 5, 1F1, and waits for the output of stage 0 for microbatch 1: "
        "1RECV_F1 (position 4) is behind 1SEND_B0 (position 3), the head of communicator all on "
        "rank 1",
        "  the circle:",
        "    rank 0: 0RECV_B0 (position 4) is behind 0SEND_F1 (position 3), the head of "
        "communicator all on rank 0",
        "    rank 0: 0SEND_F1 (position 3) heads communicator all and waits for 1RECV_F1 "
        "(position 4) of rank 1",
        "    rank 1: 1RECV_F1 (position 4) is behind 1SEND_B0 (position 3), the head of "
        "communicator all on rank 1",
        "    rank 1: 1SEND_B0 (position 3) heads communicator all and waits for 0RECV_B0 "
        "(position 4) of rank 0",
    ]


def test_loops_with_receives_posted_ahead_hang_on_one_communicator() -> None:
    """Stages 0 to 3 on two ranks: both post a receive in front of the send the other waits for."""
    schedule = build("interleaved_1f1b", num_ranks=2, num_microbatches=4, stages_per_rank=2)
    ahead = lower(schedule)
    assert verify(ahead, transport="nccl", communicators="per_channel") == ()
    (told,) = verify(ahead, transport="nccl", communicators="per_direction")
    assert told.rule is Rule.DEADLOCK
    circle = str(told).split("the circle:\n")[1].splitlines()
    assert [line.strip() for line in circle] == [
        "rank 0: 2RECV_F0 (position 3) heads communicator F and waits for 1SEND_F0 (position 4) "
        "of rank 1",
        "rank 1: 1SEND_F0 (position 4) is behind 1RECV_F1 (position 1), the head of "
        "communicator F on rank 1",
        "rank 1: 1RECV_F1 (position 1) heads communicator F and waits for 0SEND_F1 (position 5) "
        "of rank 0",
        "rank 0: 0SEND_F1 (position 5) is behind 2RECV_F0 (position 3), the head of "
        "communicator F on rank 0",
    ]
    assert verify(lower(schedule, ahead=0), transport="nccl") == ()
    assert verify(schedule, transport="nccl") == ()  # lowered for its communicators


def test_a_rank_that_does_not_get_to_its_transfer_is_a_link_of_the_circle() -> None:
    """Rank 1 stands at a compute action in front of the send that rank 0's queue waits for."""
    program = parse_orders(
        "0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", placement=loop(num_ranks=2)
    )
    assert find_deadlock(program, Transport.RENDEZVOUS) == ()
    assert find_deadlock(program, Transport.NCCL) == ()
    waits = find_deadlock(program, Transport.NCCL, Communicators.SHARED)
    assert [(wait.rank, wait.action, wait.waits_for) for wait in waits] == [
        (0, "0B0", 1),
        (1, "1F0", 0),
    ]
    (told,) = verify(program, transport="nccl", communicators="shared")
    circle = str(told).split("the circle:\n")[1].splitlines()
    assert [line.strip() for line in circle] == [
        "rank 0: 0RECV_B0 (position 0) heads communicator all and waits for 1SEND_B0 (position 3) "
        "of rank 1",
        "rank 1: 1SEND_B0 (position 3) is not on communicator all before rank 1 gets there",
        "rank 1 stands at position 1, 1F0",
        "rank 1: 1RECV_F0 (position 0) heads communicator all and waits for 0SEND_F0 (position 2) "
        "of rank 0",
        "rank 0: 0SEND_F0 (position 2) is behind 0RECV_B0 (position 0), the head of communicator "
        "all on rank 0",
    ]


def test_transfers_of_one_unit_on_the_same_way_go_in_order() -> None:
    """A batch does not reorder what goes from one rank to another; elsewhere it may."""
    program = parse_orders(
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        placement=loop(num_ranks=2),
    )
    waits = find_deadlock(program, Transport.NCCL)
    assert [wait.action for wait in waits] == ["0B0", "1F0"]
    assert "0SEND_F0 (position 3) on communicator F is behind 0SEND_F1 (position 2)" in str(
        deadlock_violations(program, Transport.NCCL)[0]
    )
    assert verify(program, transport="nccl")[0].rule is Rule.CHANNEL  # told first


def test_one_communicator_merges_the_streams_of_both_directions() -> None:
    """On a loop of two ranks, 0 sends both F and B to 1; without tags their order must agree."""
    schedule = build("interleaved_1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=2)
    program = lower(schedule, ahead=0)
    assert verify(program, transport="nccl", communicators="shared") == ()
    left, right = (list(order) for order in program.ranks)
    words = [str(item) for item in right]
    first, second = words.index("3RECV_F0"), words.index("1RECV_B0")
    assert first < second
    right[first], right[second] = right[second], right[first]
    swapped = program.with_ranks((tuple(left), tuple(right)))
    found = verify(swapped, transport="nccl", communicators="shared")
    assert {one.rule for one in found} <= {Rule.CHANNEL, Rule.ORDER}
    assert found


def is_ahead(schedule: Schedule, communicators: Communicators) -> bool:
    """Whether receives are posted ahead for these communicators."""
    program = lower_for(schedule, communicators)
    assert compute_only(program) == schedule
    assert program in (lower(schedule), lower(schedule, ahead=0))
    return program == lower(schedule)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_receives_are_posted_ahead_wherever_that_is_proved(p: int) -> None:
    """Always on channels of their own; by direction on a line of ranks, and not on a loop."""
    for m in (1, 2, 5):
        for name, schedule in generated(p, m):
            is_line = schedule.num_stages == p
            found = [is_ahead(schedule, one) for one in Communicators]
            assert found == [True, is_line, False], (name, p, m)


def test_lowered_programs_are_taken_as_they_are() -> None:
    """Who gave transfers keeps them."""
    program = lower(build("looped_bfs", num_ranks=2, num_microbatches=2, stages_per_rank=2))
    assert lower_for(program) == program


def refused(name: str, schedule: Schedule) -> list[str]:
    """The rules under which a schedule is not proved, with the first reason."""
    found = [str(one) for one in (*verify(schedule), *verify(schedule, transport="nccl"))]
    for sharing in Communicators:
        for batched in (True, False):
            program = lower_for(schedule, sharing, batched=batched)
            waits = find_deadlock(program, Transport.NCCL, sharing, batched=batched)
            found += [f"{sharing}, batched={batched}: {wait}" for wait in waits[:1]]
    return [f"{name}: {one}" for one in found]


@pytest.mark.parametrize("p", range(1, 17))
def test_every_generator_is_proved_for_every_way_of_sharing(p: int) -> None:
    """Few and many microbatches for each number of ranks, batched and one by one."""
    for m in {1, 64 // p**2} if p <= 5 else {1 + p % 2}:
        for name, schedule in every_schedule(p, m) if 1 < p <= 5 else generated(p, m):
            assert refused(f"{name} {p} {m}", schedule) == []


@pytest.mark.sweep
@pytest.mark.parametrize("p", range(1, 17))
def test_the_whole_grid_is_proved(p: int) -> None:
    """All numbers of microbatches up to 64, under the three rules and by direction."""
    for m in range(1, 65):
        for name, schedule in generated(p, m):
            assert verify(schedule) == (), (name, p, m)
            assert verify(schedule, transport="nccl") == (), (name, p, m)
