"""Adds the transfers: a SEND right after what it sends, a RECV ahead of what needs it.

Transfers are placed along a walk through the schedule (`ir.walk`): when an item produces a value
that another rank needs, its SEND goes to the end of the producer's order so far, and the RECV to
the end of the consumer's. In that order of all events every SEND is followed at once by its
RECV and each rank's own order is respected, so no rank can wait in a circle: not when sends are
buffered, not when a message takes both sides, not when a SEND blocks until its RECV is posted.

`ahead` then moves each RECV earlier by that many compute items of its rank, never past another
RECV of its channel, so that a message can travel while the rank still computes. Posting earlier
removes waits and adds none, as long as every channel is a stream of its own.
"""

from __future__ import annotations

from stretto.errors import InputError, ScheduleError
from stretto.ir.action import COMPUTE, RECEIVES, Action, AnyAction, Overlap, halves
from stretto.ir.deps import channel_of, describe_value, gives, transfer_of
from stretto.ir.schedule import Schedule
from stretto.ir.walk import walk


def add_comms(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """Insert SEND_F, RECV_F, SEND_B and RECV_B for every value that crosses ranks.

    Args:
        schedule: A schedule without transfers.
        ahead: By how many compute items a RECV is posted before the place where its message is
            produced at the latest; 0 posts in order of production only, an order in which every
            rank may also sit in a RECV until its SEND comes (devices without asynchronous
            transfers).

    Returns:
        The schedule with transfers; compute order unchanged.

    Raises:
        InputError: the schedule has transfers already, or `ahead` is negative.
        ScheduleError: the orders wait for each other in a circle, or for what nobody produces.

    Cost: linear in the number of actions.
    """
    if schedule.is_lowered:
        raise InputError(
            "add_comms: the schedule has transfers already; pass compute_only(schedule)"
        )
    if ahead < 0:
        raise InputError(f"add_comms: ahead is {ahead}; it cannot be negative")
    walked = walk(schedule)
    if walked.blocked:
        first = walked.blocked[0]
        item = schedule.ranks[first.rank][first.position]
        missing = ", ".join(describe_value(value) for value in first.missing)
        raise ScheduleError(
            f"rank {first.rank}, position {first.position}: {item} waits for ever for {missing}; "
            "verify names every rank's wait",
            walked.blocked,
        )
    orders: list[list[AnyAction]] = [[] for _ in schedule.ranks]
    for visit in walked.visits:
        item = schedule.ranks[visit.rank][visit.position]
        orders[visit.rank].append(item)
        for action in halves(item):
            for value in gives(action, schedule.skips):
                peers = transfer_of(value, schedule)
                if peers is not None:
                    send, receive = peers
                    orders[visit.rank].append(send)
                    orders[schedule.rank_of(receive.stage, receive.microbatch)].append(receive)
    lowered = schedule.with_ranks(tuple(tuple(order) for order in orders))
    return post_ahead(lowered, ahead) if ahead else lowered


def post_ahead(schedule: Schedule, ahead: int) -> Schedule:
    """Move every RECV earlier by `ahead` compute items, in order within its channel."""
    return schedule.with_ranks(
        tuple(_post_rank_ahead(schedule, order, ahead) for order in schedule.ranks)
    )


def _post_rank_ahead(
    schedule: Schedule, order: tuple[AnyAction, ...], ahead: int
) -> tuple[AnyAction, ...]:
    compute: list[AnyAction] = []
    before: dict[int, list[AnyAction]] = {}  # transfers in front of the n-th compute item
    receives: dict[int, list[AnyAction]] = {}
    for item in order:
        if isinstance(item, Overlap) or item.kind in COMPUTE:
            compute.append(item)
        elif isinstance(item, Action) and item.kind in RECEIVES:
            receives.setdefault(max(0, len(compute) - ahead), []).append(item)
        else:
            before.setdefault(len(compute), []).append(item)
    result: list[AnyAction] = []
    for slot in range(len(compute) + 1):
        # sends first: what is ready leaves before new room is made for what comes
        result += before.get(slot, [])
        result += receives.get(slot, [])
        result += compute[slot : slot + 1]
    _assert_channels_in_order(schedule, order, tuple(result))
    return tuple(result)


def _assert_channels_in_order(
    schedule: Schedule, before: tuple[AnyAction, ...], after: tuple[AnyAction, ...]
) -> None:
    def streams(order: tuple[AnyAction, ...]) -> dict[object, list[AnyAction]]:
        found: dict[object, list[AnyAction]] = {}
        for item in order:
            if isinstance(item, Action) and item.kind in RECEIVES:
                found.setdefault(channel_of(item, schedule), []).append(item)
        return found

    assert streams(before) == streams(after), "posting ahead changed the order of a channel"
