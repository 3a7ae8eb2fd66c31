"""JSON and CSV: what is written can be read, and nothing else is."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from stretto.errors import FormatError, InputError
from stretto.ir import Costs, Link, MemoryPoint, Schedule, Skip, Span, Timeline, parse_action
from stretto.ir.files import (
    costs_from_json,
    costs_to_json,
    schedule_from_json,
    schedule_to_json,
    timeline_from_json,
    timeline_to_json,
)
from stretto.ir.placement import bidirectional, custom
from stretto.ir.text import from_csv, parse_orders, to_csv
from stretto.passes import lower

SCHEDULE = parse_orders("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
COSTS = Costs(
    forward_s=(1, Fraction(3, 2)),
    input_s=(0.25, 1),
    weight_s=(1, 1),
    held_bytes=(10, 20),
    latency_s=Fraction(1, 3),
    links=(Link(source=0, target=1, latency_s=2, bandwidth_bytes_per_s=100),),
)


def test_schedules_survive_json_with_all_they_can_hold() -> None:
    """Replicas, routes, skips, pairs, whole-stage actions, transfers and frees."""
    two = Schedule(
        placement=bidirectional(num_ranks=2),
        num_microbatches=2,
        ranks=(tuple(map(parse_action, ("0UNSHARD", "(0F0;1B1)OVERLAP_F_B"))), ()),
        replica_of_microbatch=(0, 1),
    )
    skipping = lower(
        Schedule(
            placement=custom([0, 1, 0]),
            num_microbatches=1,
            ranks=parse_orders("0F0 2F0 2B0 0B0\n1F0 1B0", placement=custom([0, 1, 0])).ranks,
            skips=(Skip(source=0, targets=(2,)),),
        )
    )
    for schedule in (SCHEDULE, lower(SCHEDULE), two, skipping):
        assert schedule_from_json(schedule_to_json(schedule)) == schedule


def test_costs_and_timelines_survive_json_exactly() -> None:
    """Fractions stay fractions."""
    assert costs_from_json(costs_to_json(COSTS)) == COSTS
    timeline = Timeline(
        num_ranks=2,
        spans=(Span(1, SCHEDULE.ranks[1][0], Fraction(1, 3), 0.5),),  # type: ignore[arg-type]  # reason: a single action
        memory=(MemoryPoint(1, Fraction(1, 3), 1),),
    )
    assert timeline_from_json(timeline_to_json(timeline)) == timeline


def changed(text: str, **changes: Any) -> str:
    """JSON with keys changed; None drops one."""
    body = {**json.loads(text), **changes}
    return json.dumps({key: value for key, value in body.items() if value is not None})


READERS = [
    (schedule_from_json, schedule_to_json(SCHEDULE), "stretto-schedule", "ranks"),
    (costs_from_json, costs_to_json(COSTS), "stretto-costs", "forward_s"),
    (
        timeline_from_json,
        timeline_to_json(Timeline(num_ranks=1, spans=())),
        "stretto-timeline",
        "spans",
    ),
]


@pytest.mark.parametrize(("read", "text", "name", "key"), READERS)
def test_other_files_are_refused_by_name(read: Any, text: str, name: str, key: str) -> None:
    """No JSON, another format, another version, a missing or unknown key, a wrong type."""
    for broken, told in [
        ("{", "this is not JSON"),
        ("[]", f"expected a {name} file"),
        (changed(text, format="other"), "found format 'other'"),
        (changed(text, version=2), "version 2 is not known to this release, which reads version 1"),
        (changed(text, version=None), "version None is not known"),
        (changed(text, **{key: None}), f"keys \\['{key}'\\] are missing"),
        (changed(text, extra=1), r"unknown keys \['extra'\]"),
        (changed(text, **{key: 7}), "wrong type"),
        (changed(text, **{key: [{}]}), "wrong type"),
    ]:
        with pytest.raises(FormatError, match=told):
            read(broken)


def test_csv_holds_what_torch_can_run_and_refuses_the_rest() -> None:
    """Round trip of compute and transfers; frees, skips and replicas go into JSON only."""
    from stretto.passes import add_comms

    for schedule in (SCHEDULE, add_comms(SCHEDULE)):
        assert from_csv(to_csv(schedule)) == schedule
    assert from_csv("0F0,,0B0\n\n") == parse_orders("0F0 0B0")
    with pytest.raises(FormatError, match="cannot hold rank 0's 0FREE_F0"):
        to_csv(lower(SCHEDULE))
    two = Schedule(placement=bidirectional(num_ranks=2), num_microbatches=1, ranks=((), ()))
    with pytest.raises(FormatError, match="replicas"):
        to_csv(two)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no row"),
        ("0F0\n0F1", "stage 0 is computed on rank 0 too"),
        ("0F0,2F0", r"no rank computes stages \[1\]"),
        ("0F0,zebra", "'zebra' is not an action"),
        ("0UNSHARD", "holds no action"),
    ],
)
def test_csv_without_a_schedule_is_told_why(text: str, told: str) -> None:
    """The message says what is wrong with the rows."""
    with pytest.raises(InputError, match=told):
        from_csv(text)


def test_indices_outside_the_schedule_are_refused_where_it_is_built() -> None:
    """Rank, position and action are named."""
    for word, told in (("0F2", "a microbatch outside 0..1"), ("1F0", "a stage outside 0..0")):
        with pytest.raises(InputError, match=f"rank 0, position 1: {word} names {told}"):
            Schedule(
                placement=custom([0]),
                num_microbatches=2,
                ranks=((*SCHEDULE.ranks[0][:1], parse_action(word)),),
            )
    with pytest.raises(InputError, match="num_microbatches is 0"):
        Schedule(placement=custom([0]), num_microbatches=0, ranks=((),))
    with pytest.raises(InputError, match="orders for 1 ranks, its placement has 2"):
        Schedule(placement=custom([0, 1]), num_microbatches=1, ranks=((),))
    with pytest.raises(InputError, match="must be ascending and after the source"):
        Skip(source=2, targets=(1,))
