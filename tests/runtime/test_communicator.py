"""Communicators between threads under NCCL's rules: units, order without tags, buffers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from random_pipelines import random_order
from stretto.errors import RemoteError, TransportError
from stretto.ir import (
    RECEIVES,
    SENDS,
    Action,
    Communicators,
    Schedule,
    carried,
    channel_of,
    gives,
    needs,
)
from stretto.ir.placement import custom, loop, v
from stretto.ir.text import parse_orders
from stretto.passes import lower
from stretto.runtime import InProcessHub
from stretto.runtime.executor import channels_of_rank
from stretto.runtime.wire.message import Message, make_message
from stretto.runtime.wire.transport import Pending
from stretto.verify import Transport, find_deadlock
from stretto.verify.transfers import find_bad_transfers


def message(*values: float) -> Message:
    """A message of one tensor."""
    return make_message([torch.tensor(values)], ("tensor",), [False])


class Ranks:
    """Transports of all ranks of a program, driven from one thread."""

    def __init__(self, program: Schedule, communicators: Communicators | str) -> None:
        self.program = program
        self.hub = InProcessHub(
            program.num_ranks, rule="nccl", communicators=communicators, timeout_s=0.05
        )
        self.transports = [
            self.hub.join(rank).connect(channels_of_rank(program, rank))
            for rank in range(program.num_ranks)
        ]
        for transport in self.transports:
            transport.begin(program)

    def do(self, rank: int, position: int, *values: float) -> Pending:
        """Run one transfer of a rank; a SEND sends these values."""
        action = self.program.ranks[rank][position]
        assert isinstance(action, Action)
        channel = channel_of(action, self.program)
        if action.kind in SENDS:
            return self.transports[rank].send(channel, action, message(*values))
        return self.transports[rank].receive(channel, action)


def two_ranks(left: str, right: str) -> Schedule:
    """A program of two stages on two ranks."""
    return parse_orders(f"{left}\n{right}", placement=loop(num_ranks=2))


def test_a_unit_starts_with_its_last_transfer_and_passes_both_ways_at_once() -> None:
    """Both send first, in one batch each: neither waits for the other's turn."""
    program = two_ranks(
        "0F0 0F1 0SEND_F1 0RECV_B0 0SEND_F0 0B0 0RECV_B1 0B1",
        "1F0 1F1 1B0 1SEND_B0 1RECV_F1 1RECV_F0 1B1 1SEND_B1",
    )
    ranks = Ranks(program, "shared")
    first = ranks.do(0, 2, 1.0)
    back = ranks.do(1, 3, 2.0)
    got = ranks.do(1, 4)
    last = ranks.do(1, 5)
    answer = ranks.do(0, 3)
    assert not any(one.is_done for one in (first, back, got, last, answer))
    ranks.do(0, 4, 3.0)
    assert [one.wait(0).tensors[0].item() for one in (got, last, answer)] == [1, 3, 2]
    assert first.is_done
    assert back.is_done


def test_a_unit_waits_for_the_one_before_it_on_its_communicator() -> None:
    """The second message could pass by itself; its unit stands behind a receive that is not met."""
    program = two_ranks(
        "0RECV_B0 0F0 0SEND_F0 0B0",
        "1RECV_F0 1F0 1B0 1SEND_B0",
    )
    for sharing, passes in (("shared", False), ("per_direction", True), ("per_channel", True)):
        ranks = Ranks(program, sharing)
        ranks.do(0, 0)
        send = ranks.do(0, 2, 1.0)
        receive = ranks.do(1, 0)
        assert receive.is_done == send.is_done == passes
        if not passes:
            with pytest.raises(TransportError, match=r"1RECV_F0 on channel 0->1F waited 0.05 s"):
                receive.wait(0.05)


def test_waiting_for_a_send_does_not_wait_for_its_receiver() -> None:
    """The host goes on; the transfer is over when its receive heads the queue."""
    program = two_ranks("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    ranks = Ranks(program, "per_direction")
    send = ranks.do(0, 1, 1.0)
    assert send.wait(60) is None
    assert not send.is_done
    ranks.do(1, 0)
    assert send.is_done


FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATING, *SMALL])
def test_receive_buffers_hold_nan_until_the_message_comes(dtype: torch.dtype) -> None:
    """From the second message of an edge on they are there from the start, and are filled."""
    program = two_ranks(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    ranks = Ranks(program, "per_direction")
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype).t()
    sent = make_message([values, torch.tensor(7)], ("tensor",), [False, False])

    def send(position: int) -> None:
        action = program.ranks[0][position]
        assert isinstance(action, Action)
        ranks.transports[0].send(channel_of(action, program), action, sent)

    receive = ranks.do(1, 0)
    assert receive.message is None
    send(1)
    receive = ranks.do(1, 4)
    assert receive.message is not None
    buffers = receive.message.tensors
    assert buffers[0].to(torch.complex128).isnan().all()
    send(3)
    got = receive.wait(0).tensors
    assert torch.equal(got[0].to(torch.complex128), values.to(torch.complex128))
    assert got[0].stride() == values.stride()
    assert got[1].item() == 7
    assert buffers[0].data_ptr() == got[0].data_ptr()


def test_buffers_of_an_old_layout_are_not_used_for_a_new_one() -> None:
    """Two receives are posted for short messages, and two long ones come."""
    program = two_ranks(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2",
        "1RECV_F0 1F0 1RECV_F1 1RECV_F2 1F1 1F2",
    )
    ranks = Ranks(program, "per_direction")
    ranks.do(0, 1, 1.0)
    ranks.do(1, 0)
    receives = [ranks.do(1, position) for position in (2, 3)]
    assert [one.message.tensors[0].numel() for one in receives if one.message] == [1, 1]
    long = [float(number) for number in range(100)]
    ranks.do(0, 3, *long)
    ranks.do(0, 5, *long, 100.0)
    assert [one.wait(0).tensors[0].tolist() for one in receives] == [long, [*long, 100.0]]


def test_messages_that_meet_the_wrong_receive_fail_by_name() -> None:
    """Without tags, order alone decides what meets what."""
    program = two_ranks(
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    ranks = Ranks(program, "per_direction")
    ranks.do(0, 2, 1.0)
    ranks.do(0, 3, 1.0)
    receive = ranks.do(1, 0)
    ranks.do(1, 1)
    with pytest.raises(TransportError, match="1RECV_F0 met 0SEND_F1 on F"):
        receive.wait(0)


def test_a_failed_rank_ends_transfers_of_every_state() -> None:
    """Those that wait in a unit, and those whose unit is not complete."""
    program = two_ranks("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    ranks = Ranks(program, "shared")
    pending = [ranks.do(0, 1, 1.0), ranks.do(1, 0)]
    ranks.hub.fail(0, ValueError("boom"))
    pending.append(ranks.do(0, 2))
    for one in pending:
        with pytest.raises(RemoteError, match="rank 0 failed: ValueError: boom"):
            one.wait(0)


def test_what_was_sent_arrives_though_its_sender_has_closed() -> None:
    """A rank may be done before its messages are."""
    program = two_ranks("0F0 0SEND_F0", "1RECV_F0 1F0")
    ranks = Ranks(program, "shared")
    ranks.do(0, 1, 5.0)
    ranks.transports[0].close()
    assert ranks.do(1, 0).wait(0).tensors[0].item() == 5


def ends_for_real(program: Schedule, communicators: Communicators) -> bool:
    """Whether a program, run over a real hub, comes to its end with the right messages."""
    ranks = Ranks(program, communicators)
    at = [0] * program.num_ranks
    made: list[set[Any]] = [set() for _ in at]
    coming: list[dict[Any, Pending]] = [{} for _ in at]
    every: list[tuple[Pending, Any]] = []

    def is_there(rank: int, value: Any) -> bool:
        pending = coming[rank].get(value)
        return value in made[rank] or (pending is not None and pending.is_done)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program.ranks):
            while at[rank] < len(order):
                item = order[at[rank]]
                assert isinstance(item, Action)
                if not all(is_there(rank, value) for value in needs(item, program.num_stages)):
                    break
                value = carried(item)
                if value is not None:
                    pending = ranks.do(rank, at[rank], *map(float, value[:3]))
                    every.append((pending, value))
                    if item.kind in RECEIVES:
                        coming[rank][value] = pending
                else:
                    made[rank].update(gives(item))
                at[rank] += 1
                moved = True
    if any(here < len(order) for here, order in zip(at, program.ranks, strict=True)):
        return False
    if not all(pending.is_done and pending.error is None for pending, _ in every):
        return False
    for pending, value in every:
        if pending.action.kind in RECEIVES:
            assert pending.message is not None
            assert pending.message.tensors[0].tolist() == list(map(float, value[:3]))
    return True


PLACEMENTS = (
    loop(num_ranks=3),
    loop(num_ranks=2, stages_per_rank=2),
    v(num_ranks=2),
    custom([0, 1, 2, 0]),
    custom([1, 0, 2]),
)


@pytest.mark.parametrize("communicators", list(Communicators))
def test_programs_end_for_real_exactly_where_the_proof_says_so(
    communicators: Communicators,
) -> None:
    """Random orders on lines, loops and Vs; transfers ahead, in order of production, or moved."""
    verdicts: Counter[bool] = Counter()
    for seed in range(60):
        draw = random.Random(f"{communicators} {seed}")
        placement = draw.choice(PLACEMENTS)
        program = lower(random_order(draw, placement, 3), ahead=draw.choice((0, 1, 1, 2)))
        orders = [list(order) for order in program.ranks]
        for _ in range(draw.choice((0, 1, 1))):
            order = draw.choice(orders)
            places = [at for at, item in enumerate(order) if "RECV" in str(item)]
            if places:
                place = draw.choice(places)
                order.insert(max(0, place - draw.randrange(4)), order.pop(place))
        program = program.with_ranks(tuple(tuple(order) for order in orders))
        proved = not list(find_bad_transfers(program, communicators)) and not find_deadlock(
            program, Transport.NCCL, communicators
        )
        assert ends_for_real(program, communicators) == proved, program
        verdicts[proved] += 1
    assert verdicts[True] >= 5
    assert verdicts[False] >= 5
