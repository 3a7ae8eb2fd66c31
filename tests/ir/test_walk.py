"""The walk without time: rounds, and where ranks get stuck."""

from __future__ import annotations

import pytest

from stretto.errors import InputError
from stretto.ir import Schedule, Value, ValueKind
from stretto.ir.placement import custom, loop
from stretto.ir.text import parse_orders
from stretto.ir.walk import walk
from stretto.passes import add_comms
from stretto.schedules import build


def drawn(schedule: Schedule) -> list[str]:
    """One row per rank, one column per round."""
    rounds: list[dict[int, str]] = [{} for _ in schedule.ranks]
    for visit in walk(schedule).visits:
        assert visit.round not in rounds[visit.rank], "two items of a rank in one round"
        rounds[visit.rank][visit.round] = str(schedule.ranks[visit.rank][visit.position])
    last = max(column for row in rounds for column in row)
    return [" ".join(row.get(column, " . ") for column in range(last + 1)) for row in rounds]


def test_a_round_is_one_item_per_rank() -> None:
    """What a rank makes in a round is there for others in the next one."""
    assert drawn(build("one_f_one_b", num_ranks=3, num_microbatches=4)) == [
        "0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3",
        " .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  . ",
        " .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   . ",
    ]


def test_the_order_of_ranks_does_not_matter() -> None:
    """Upwards the rank that makes a value comes later in a round; nobody sees it sooner."""
    upwards = parse_orders("1F0 1B0\n0F0 0B0", placement=custom([1, 0]))
    assert drawn(upwards) == [" .  1F0 1B0  . ", "0F0  .   .  0B0"]


def test_a_pair_waits_for_both_halves_and_takes_one_round() -> None:
    """A pair needs all that its halves need."""
    paired = parse_orders("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    rounds = {(one.rank, one.position): one.round for one in walk(paired).visits}
    assert rounds[0, 2] == 3  # 1B0 runs in round 2


def test_stuck_ranks_are_told_with_what_they_miss() -> None:
    """Each rank's first item that never runs, and the values nobody can make."""
    circle = parse_orders("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", placement=loop(num_ranks=2))
    walked = walk(circle)
    assert len(walked.visits) == 1
    assert [(one.rank, one.position, one.missing) for one in walked.blocked] == [
        (0, 1, (Value(ValueKind.GRADIENT, 1, 0),)),
        (1, 0, (Value(ValueKind.OUTPUT, 0, 1),)),
    ]


def test_lowered_schedules_are_refused() -> None:
    """The walk knows no transfers, and says what to pass."""
    with pytest.raises(InputError, match="pass compute_only"):
        walk(add_comms(parse_orders("0F0 0B0\n1F0 1B0")))
