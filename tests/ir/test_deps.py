"""The dependency rule as a table: what every kind of action needs and gives."""

from __future__ import annotations

import pytest

from stretto.ir import (
    Action,
    Schedule,
    Skip,
    StageAction,
    Value,
    ValueKind,
    carried,
    channel_of,
    describe_value,
    gives,
    needs,
    parse_action,
    transfer_of,
)
from stretto.ir.placement import bidirectional, custom

OUT, GRAD, GRAPH, DEFERRED = ValueKind
PLAIN = [
    # of 4 stages; a value without target goes to the neighbour
    ("0F5", [], [(OUT, 0, 5), (GRAPH, 0, 5)]),
    ("2F5", [(OUT, 1, 5)], [(OUT, 2, 5), (GRAPH, 2, 5)]),
    ("2B5", [(GRAPH, 2, 5), (GRAD, 3, 5)], [(GRAD, 2, 5)]),
    ("2I5", [(GRAPH, 2, 5), (GRAD, 3, 5)], [(GRAD, 2, 5), (DEFERRED, 2, 5)]),
    ("3B5", [(GRAPH, 3, 5)], [(GRAD, 3, 5)]),
    ("3I5", [(GRAPH, 3, 5)], [(GRAD, 3, 5), (DEFERRED, 3, 5)]),
    ("2W5", [(DEFERRED, 2, 5)], []),
    ("2SEND_F5", [(OUT, 2, 5)], []),
    ("2RECV_F5", [], [(OUT, 1, 5)]),
    ("2SEND_B5", [(GRAD, 2, 5)], []),
    ("2RECV_B5", [], [(GRAD, 3, 5)]),
    ("2FREE_F5", [(OUT, 2, 5)], []),
    ("2FREE_B5", [(GRAD, 2, 5)], []),
    ("2UNSHARD", [], []),
]
SKIPPING = [
    # a skip from stage 0 to stages 2 and 3: values go straight, gradients down the chain 3, 2, 0
    ("0F5", [], [(OUT, 0, 5), (OUT, 0, 5, 2), (OUT, 0, 5, 3), (GRAPH, 0, 5)]),
    ("1F5", [(OUT, 0, 5)], [(OUT, 1, 5), (GRAPH, 1, 5)]),
    ("2F5", [(OUT, 1, 5), (OUT, 0, 5, 2)], [(OUT, 2, 5), (GRAPH, 2, 5)]),
    ("3F5", [(OUT, 2, 5), (OUT, 0, 5, 3)], [(OUT, 3, 5), (GRAPH, 3, 5)]),
    ("3B5", [(GRAPH, 3, 5)], [(GRAD, 3, 5), (GRAD, 3, 5, 2)]),
    ("2B5", [(GRAPH, 2, 5), (GRAD, 3, 5), (GRAD, 3, 5, 2)], [(GRAD, 2, 5), (GRAD, 2, 5, 0)]),
    ("1B5", [(GRAPH, 1, 5), (GRAD, 2, 5)], [(GRAD, 1, 5)]),
    ("0B5", [(GRAPH, 0, 5), (GRAD, 1, 5), (GRAD, 2, 5, 0)], [(GRAD, 0, 5)]),
    ("0SEND_F5@2", [(OUT, 0, 5, 2)], []),
    ("2RECV_F5@0", [], [(OUT, 0, 5, 2)]),
    ("3SEND_B5@2", [(GRAD, 3, 5, 2)], []),
    ("2RECV_B5@3", [], [(GRAD, 3, 5, 2)]),
]
SKIP = (Skip(source=0, targets=(2, 3)),)


@pytest.mark.parametrize(
    ("word", "needed", "given", "skips"),
    [(*row, ()) for row in PLAIN] + [(*row, SKIP) for row in SKIPPING],
)
def test_every_kind_needs_and_gives_what_the_table_says(
    word: str, needed: list[tuple], given: list[tuple], skips: tuple[Skip, ...]
) -> None:
    """Values are those of the action's own microbatch, on the stages named."""
    action = parse_action(word)
    assert isinstance(action, Action | StageAction)
    assert set(needs(action, 4, skips)) == {Value(*one) for one in needed}
    assert set(gives(action, skips)) == {Value(*one) for one in given}


@pytest.mark.parametrize(
    ("value", "send", "receive", "channel"),
    [
        ((OUT, 0, 1), "0SEND_F1", "1RECV_F1", "0->1F"),
        ((OUT, 2, 1), "2SEND_F1", "3RECV_F1", "1->0F"),
        ((GRAD, 1, 1), "1SEND_B1", "0RECV_B1", "1->0B"),
        ((GRAD, 3, 1), "3SEND_B1", "2RECV_B1", "0->1B"),
        ((OUT, 0, 1, 2), "0SEND_F1@2", "2RECV_F1@0", "0->1F"),
        ((GRAD, 2, 1, 0), "2SEND_B1@0", "0RECV_B1@2", "1->0B"),
    ],
)
def test_a_value_crosses_ranks_by_one_send_and_one_receive(
    value: tuple, send: str, receive: str, channel: str
) -> None:
    """Stages 0, 1, 2, 3 lie on ranks 0, 1, 1, 0; both ends name the same channel."""
    schedule = Schedule(
        placement=custom([0, 1, 1, 0]), num_microbatches=2, ranks=((), ()), skips=SKIP
    )
    peers = transfer_of(Value(*value), schedule)
    assert peers is not None
    assert (str(peers[0]), str(peers[1])) == (send, receive)
    assert [carried(end) for end in peers] == [Value(*value)] * 2
    assert [str(channel_of(end, schedule)) for end in peers] == [channel] * 2


@pytest.mark.parametrize(
    "value",
    [
        (OUT, 1, 0),  # both stages on one rank
        (GRAD, 2, 0),
        (OUT, 3, 0),  # past the last stage
        (GRAD, 0, 0),  # before the first
        (OUT, 0, 0, 3),  # a skip inside a rank
        (GRAPH, 0, 0),
        (DEFERRED, 1, 0),
    ],
)
def test_other_values_cross_nothing(value: tuple) -> None:
    """Inner values, the ends of the pipeline, and edges inside a rank have no transfer."""
    schedule = Schedule(placement=custom([0, 1, 1, 0]), num_microbatches=1, ranks=((), ()))
    assert transfer_of(Value(*value), schedule) is None


def test_the_replica_of_a_microbatch_decides_the_ranks() -> None:
    """Of two replicas one sends its outputs down the ranks, the other one up."""
    schedule = Schedule(
        placement=bidirectional(num_ranks=2),
        num_microbatches=2,
        ranks=((), ()),
        replica_of_microbatch=(0, 1),
    )
    ends = [transfer_of(Value(OUT, 0, microbatch), schedule) for microbatch in (0, 1)]
    assert [str(channel_of(end[0], schedule)) for end in ends if end] == ["0->1F", "1->0F"]


def test_values_are_told_in_words() -> None:
    """A message about waiting reads as a sentence."""
    assert describe_value(Value(OUT, 1, 4)) == "the output of stage 1 for microbatch 4"
    assert describe_value(Value(GRAD, 2, 0)) == "the gradient of stage 2's input for microbatch 0"
    assert describe_value(Value(OUT, 0, 1, 2)) == (
        "the skip values of stage 0 for stage 2, microbatch 1"
    )
