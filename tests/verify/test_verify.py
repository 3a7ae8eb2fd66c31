"""What the verifier rejects, on cases small enough to check by eye."""

from __future__ import annotations

import pytest

from stretto.errors import InputError
from stretto.ir import Costs, Schedule, Skip
from stretto.ir.placement import bidirectional, custom, loop
from stretto.ir.text import parse_orders
from stretto.passes import lower
from stretto.schedules import build
from stretto.verify import Rule, peak_memory, verify

CASES: list[tuple[str, str, Rule, int, int | None, str]] = [
    ("drop", "0F0 0F1 0B0\n1F0 1B0 1F1 1B1", Rule.ONCE, 0, None, "0B1 is missing"),
    ("duplicate", "0F0 0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", Rule.ONCE, 0, 2, "0F0 is there twice"),
    ("swap", "0F0 0B1 0F1 0B0\n1F0 1B0 1F1 1B1", Rule.ORDER, 0, 1, "0B1 before 0F1"),
    ("wrong rank", "0F0 0F1 0B0 0B1 1F0\n1B0 1F1 1B1", Rule.OWNER, 0, 4, "1F0 belongs to rank 1"),
    ("B and I", "0F0 0B0 0I0\n1F0 1B0", Rule.ONCE, 0, 1, "0B0 is there besides 0I0"),
    ("I without W", "0F0 0I0\n1F0 1B0", Rule.ONCE, 0, None, "0W0 is missing"),
    ("W before I", "0F0 0W0 0I0\n1F0 1B0", Rule.ORDER, 0, 1, "0W0 before 0I0"),
    ("a circle", "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", Rule.DEADLOCK, 0, 1, "waits for ever"),
    ("a pair", "0F0 0B0\n1F0 1B0", Rule.ONCE, 0, None, ""),
]


@pytest.mark.parametrize(("name", "text", "rule", "rank", "position", "words"), CASES[:-1])
def test_each_fault_gives_its_violation(
    name: str, text: str, rule: Rule, rank: int, position: int | None, words: str
) -> None:
    """Rule, rank, position and action are those of the fault."""
    found = verify(parse_orders(text, placement=loop(num_ranks=2)))
    first = found[0]
    assert (first.rule, first.rank, first.position) == (rule, rank, position), name
    assert words in str(first)
    assert "rule: " in str(first)


PROGRAM = (
    "0F0 0SEND_F0 0FREE_F0 0RECV_B0 0B0",
    "1RECV_F0 1F0 1B0 1SEND_B0 1FREE_B0",
)


def program(left: str, right: str) -> Schedule:
    """Two ranks, one microbatch."""
    return parse_orders(f"{left}\n{right}", placement=loop(num_ranks=2))


@pytest.mark.parametrize(
    ("old", "new", "rule", "words"),
    [
        (" 0SEND_F0 0FREE_F0", "", Rule.TRANSFER, "rank 0: 0SEND_F0 is missing"),
        ("1RECV_F0 ", "", Rule.TRANSFER, "rank 1: 1RECV_F0 is missing"),
        ("0SEND_F0", "0SEND_F0 0SEND_F0", Rule.TRANSFER, "0SEND_F0 is there twice"),
        ("0SEND_F0", "0SEND_F0 0SEND_B0", Rule.TRANSFER, "0SEND_B0 carries what nobody"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", Rule.ORDER, "0SEND_F0 before 0F0"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", Rule.ORDER, "1F0 before 1RECV_F0"),
        ("0SEND_F0 0FREE_F0", "0FREE_F0 0SEND_F0", Rule.FREE, "0FREE_F0 before its send"),
        ("0FREE_F0", "0FREE_F0 0FREE_F0", Rule.FREE, "0FREE_F0 is there twice"),
        (" 0FREE_F0", "", Rule.FREE, "0FREE_F0 is missing"),
    ],
)
def test_each_fault_of_a_lowered_program_gives_its_violation(
    old: str, new: str, rule: Rule, words: str
) -> None:
    """Transfers and frees are checked one by one."""
    assert verify(program(*PROGRAM)) == ()
    broken = [line.replace(old, new) for line in PROGRAM]
    first = verify(program(*broken))[0]
    assert first.rule is rule
    assert words in str(first)


def test_misrouted_transfers_are_told_with_their_rank() -> None:
    """A send on the wrong rank belongs to another."""
    broken = program("0F0 0RECV_B0 0B0", "1RECV_F0 0SEND_F0 1F0 1B0 1SEND_B0")
    told = [str(one) for one in verify(broken)]
    assert any("0SEND_F0 belongs to rank 0" in one for one in told)


def test_channels_must_order_their_messages_alike() -> None:
    """Receives in another order than the sends would take each other's messages."""
    swapped = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    first = verify(swapped)[0]
    assert first.rule is Rule.CHANNEL
    assert (first.rank, first.position, first.action) == (1, 0, "1RECV_F1")
    assert "meets 0SEND_F0 on channel 0->1F" in str(first)


def test_a_deadlock_names_every_rank_and_the_circle() -> None:
    """Where each rank is, what it waits for, and who waits for whom."""
    stuck = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    assert verify(stuck, transport="buffered") == ()
    (told,) = verify(stuck, transport="blocking")
    assert told.rule is Rule.DEADLOCK
    assert "rank 0 is at position 3, 0SEND_F1, and waits for its receiver: 1RECV_F1" in str(told)
    assert "rank 1 is at position 3, 1SEND_B0, and waits for its receiver: 0RECV_B0" in str(told)
    assert "rank 0 (0SEND_F1) -> rank 1 (1SEND_B0) -> rank 0" in str(told)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs"])
def test_every_generator_is_proved_under_every_rule(name: str) -> None:
    """All sizes up to 8 ranks, 3 stages each, and odd numbers of microbatches."""
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 3, 5, 8, 13, 16):
            for v in (2, 3) if name in ("interleaved_1f1b", "looped_bfs") else (0,):
                options = {"stages_per_rank": v} if v else {}
                schedule = build(name, num_ranks=p, num_microbatches=m, **options)
                assert verify(schedule) == (), (name, p, m, v)


def test_receives_posted_only_where_they_are_needed_can_hang() -> None:
    """The same orders with receives just before use deadlock when sends block."""
    schedule = build("interleaved_1f1b", num_ranks=4, num_microbatches=8, stages_per_rank=2)
    late = lower(schedule)
    orders = []
    for order in late.ranks:
        receives = [item for item in order if "RECV" in str(item)]
        rest = [item for item in order if "RECV" not in str(item)]
        placed = []
        for item in rest:
            text = str(item)
            wanted = [r for r in receives if str(r).replace("RECV_", "") == text]
            placed += [*wanted, item]
        orders.append(tuple(placed))
    lazy = late.with_ranks(tuple(orders))
    assert verify(lazy, transport="buffered") == ()
    assert verify(lazy, transport="blocking")[0].rule is Rule.DEADLOCK


def test_memory_limits_name_the_action_that_breaks_them() -> None:
    """The first forward that is one too many, and the peak that would do."""
    schedule = build("one_f_one_b", num_ranks=3, num_microbatches=6)
    assert peak_memory(schedule) == (3, 2, 1)
    assert verify(schedule, memory=3) == ()
    assert verify(schedule, memory=[3, 2, 1]) == ()
    (told,) = verify(schedule, memory=2)
    assert (told.rule, told.rank, told.action) == (Rule.MEMORY, 0, "0F2")
    assert "holds 3" in str(told).replace("hold 3", "holds 3")
    with pytest.raises(InputError, match="2 limits for 3 ranks"):
        verify(schedule, memory=[1, 2])


def test_peak_memory_in_bytes_tells_both_parts() -> None:
    """Bytes held until I, and the smaller part that waits for W."""
    schedule = parse_orders("0F0 0I0 0F1 0I1 0W0 0W1")
    costs = Costs(
        forward_s=(1,), input_s=(1,), weight_s=(1,), held_bytes=(10,), deferred_bytes=(4,)
    )
    assert peak_memory(schedule, costs) == (14,)
    assert peak_memory(schedule) == (2,)


def test_skip_connections_are_proved_like_any_edge() -> None:
    """A stage needs what skips to it; without the transfer the program is refused."""
    schedule = build("one_f_one_b", num_ranks=4, num_microbatches=3)
    skipping = Schedule(
        placement=schedule.placement,
        num_microbatches=3,
        ranks=schedule.ranks,
        skips=(Skip(source=0, targets=(2, 3)),),
    )
    assert verify(skipping) == ()
    program = lower(skipping)
    assert any(str(item) == "0SEND_F1@2" for item in program.ranks[0])
    cut = program.with_ranks(
        tuple(tuple(item for item in order if str(item) != "2RECV_F1@0") for order in program.ranks)
    )
    told = [str(one) for one in verify(cut)]
    assert any("2RECV_F1@0 is missing" in one for one in told)


def test_two_replicas_of_a_stage_are_proved_by_their_routes() -> None:
    """A bidirectional order is legal where each microbatch stays on its own replica."""
    placement = bidirectional(num_ranks=2)
    orders = parse_orders("0F0 1F1 1B1 0B0\n0F1 1F0 1B0 0B1", placement=custom([0, 1])).ranks
    right = Schedule(
        placement=placement, num_microbatches=2, ranks=orders, replica_of_microbatch=(0, 1)
    )
    assert verify(right) == ()
    wrong = Schedule(
        placement=placement, num_microbatches=2, ranks=orders, replica_of_microbatch=(0, 0)
    )
    assert {one.rule for one in verify(wrong)} >= {Rule.OWNER}


def test_unknown_rules_are_named() -> None:
    """The error lists the rules there are."""
    with pytest.raises(InputError, match="'eager'; it must be one of buffered, rendezvous"):
        verify(parse_orders("0F0 0B0"), transport="eager")
