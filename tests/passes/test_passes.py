"""Lowering: transfers in order of production, receives ahead, frees behind sends."""

from __future__ import annotations

import pytest

from stretto.errors import InputError, ScheduleError
from stretto.ir import carried, compute_only
from stretto.ir.placement import loop
from stretto.ir.text import format_orders, parse_orders
from stretto.passes import add_comms, add_frees, bubble_slots, lower
from stretto.schedules import build

SMALL = parse_orders("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


def rows(schedule: object) -> list[str]:
    """One line of printed actions per rank."""
    return format_orders(schedule).splitlines()  # type: ignore[arg-type]  # reason: always a schedule


def test_transfers_stand_where_they_are_produced() -> None:
    """A SEND right behind its value; the RECV where the receiver is by then."""
    assert rows(add_comms(SMALL, ahead=0)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_receives_move_ahead_by_compute_items() -> None:
    """One item earlier by default; sends that are due leave first."""
    assert rows(add_comms(SMALL)) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert rows(add_comms(SMALL, ahead=2))[0] == (
        "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1"
    )


def test_receives_move_ahead_within_their_channel() -> None:
    """However far ahead, never past another receive of the channel."""
    for ahead in (1, 2, 5):
        lowered = add_comms(build("one_f_one_b", num_ranks=4, num_microbatches=8), ahead=ahead)
        for order in lowered.ranks:
            for kind in ("RECV_F", "RECV_B"):
                numbers = [item.microbatch for item in order if item.kind.value == kind]  # type: ignore[union-attr]  # reason: single actions only
                assert numbers == sorted(numbers)
        assert compute_only(lowered) == build("one_f_one_b", num_ranks=4, num_microbatches=8)


def test_frees_stand_behind_their_sends() -> None:
    """Every sent value is given up at once; a second run of the pass is refused."""
    lowered = add_frees(add_comms(SMALL, ahead=0))
    for order in lowered.ranks:
        texts = [str(item) for item in order]
        for text in texts:
            if "SEND" in text:
                assert texts[texts.index(text) + 1] == text.replace("SEND", "FREE")
    with pytest.raises(InputError, match="has 0FREE_F0 already"):
        add_frees(lowered)
    with pytest.raises(InputError, match="has transfers already"):
        add_comms(lowered)
    with pytest.raises(InputError, match="ahead is -1"):
        add_comms(SMALL, ahead=-1)


def test_lowering_twice_changes_nothing_and_pairs_become_halves() -> None:
    """A lowered schedule is taken as it is; a pair's forward is sent before its backward."""
    assert lower(lower(SMALL)) == lower(SMALL)
    paired = parse_orders("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")
    texts = rows(lower(paired))[0].split()
    assert texts.index("0SEND_F1") < texts.index("0B0")


def test_orders_that_wait_for_ever_cannot_be_lowered() -> None:
    """The error names where and for what."""
    circle = parse_orders("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", placement=loop(num_ranks=2))
    with pytest.raises(ScheduleError, match="rank 0, position 1: 0B0 waits for ever for the grad"):
        lower(circle)


def test_edges_inside_a_rank_have_no_transfers() -> None:
    """With one rank nothing is sent, whatever the number of stages."""
    one = build("looped_bfs", num_ranks=1, num_microbatches=3, stages_per_rank=3)
    assert lower(one) == one


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("p", [1, 2, 4, 5])
def test_every_rank_has_2p_minus_2_bubbles(name: str, p: int) -> None:
    """r before its first item, r behind its last, the rest between."""
    slots = bubble_slots(build(name, num_ranks=p, num_microbatches=7))
    assert [len(mine) for mine in slots] == [2 * p - 2] * p
    for rank, mine in enumerate(slots):
        assert mine.count(0) == mine.count(14) == rank
        assert list(mine) == sorted(mine)


def ends_if_both_sides_block(program: object) -> bool:
    """Whether a program ends if a SEND and its RECV hold both ranks until they meet."""
    orders = [
        [item for item in order if "FREE" not in str(item)]
        for order in program.ranks  # type: ignore[attr-defined]  # reason: always a schedule
    ]
    at = [0] * len(orders)
    while True:
        heads = {
            rank: orders[rank][at[rank]]
            for rank in range(len(orders))
            if at[rank] < len(orders[rank])
        }
        if not heads:
            return True
        moved = False
        for rank, item in heads.items():
            if at[rank] >= len(orders[rank]) or orders[rank][at[rank]] is not item:
                continue
            if "SEND" not in str(item) and "RECV" not in str(item):
                at[rank] += 1
                moved = True
                continue
            for other, meets in heads.items():
                fits = "SEND" in str(item) and "RECV" in str(meets)
                if fits and carried(item) == carried(meets) and orders[other][at[other]] is meets:
                    at[rank] += 1
                    at[other] += 1
                    moved = True
                    break
        if not moved:
            return False


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs"])
def test_without_posting_ahead_programs_suit_devices_without_asynchronous_sends(name: str) -> None:
    """In order of production every program ends, even if receives block as sends do."""
    for p, m in ((2, 1), (2, 5), (3, 4), (4, 8)):
        options = {"stages_per_rank": 2} if name in ("interleaved_1f1b", "looped_bfs") else {}
        schedule = build(name, num_ranks=p, num_microbatches=m, **options)
        assert ends_if_both_sides_block(add_comms(schedule, ahead=0))
    ahead = add_comms(build("one_f_one_b", num_ranks=4, num_microbatches=8), ahead=1)
    assert not ends_if_both_sides_block(ahead)
