"""Lowered programs: is every message sent and received once, in the channel's order, and freed?"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.action import COMPUTE, FREES, RECEIVES, SENDS, Action, AnyAction, Kind, halves
from stretto.ir.communicators import Communicators
from stretto.ir.deps import Channel, Value, channel_of, gives, needs, transfer_of
from stretto.ir.schedule import Schedule
from stretto.verify.violation import Rule, Violation


def find_bad_transfers(
    schedule: Schedule, communicators: Communicators = Communicators.PER_CHANNEL
) -> Iterator[Violation]:
    """Missing, repeated, needless and misplaced SENDs and RECVs; streams out of order.

    What a rank sends to a rank on one communicator is one stream: if all channels share one,
    activations and gradients on the same way must be received in the order of all their sends.
    """
    merged = communicators is Communicators.SHARED
    due = _due_transfers(schedule)
    seen: dict[Action, tuple[int, int]] = {}
    streams: dict[Channel, tuple[list[Action], list[Action]]] = {}
    sound = True
    for rank, order in enumerate(schedule.ranks):
        for position, item in enumerate(order):
            if not isinstance(item, Action) or item.kind not in SENDS | RECEIVES:
                continue
            problem = _problem(schedule, due, seen, item, rank)
            if problem is not None:
                sound = False
                yield _broken(Rule.TRANSFER, rank, position, item, *problem)
                continue
            seen[item] = (rank, position)
            channel = channel_of(item, schedule)
            stream = channel._replace(direction="") if merged else channel
            sent, received = streams.setdefault(stream, ([], []))
            (sent if item.kind in SENDS else received).append(item)
    for action in due:
        if action not in seen:
            sound = False
            rank = schedule.rank_of(action.stage, action.microbatch)
            yield _broken(Rule.TRANSFER, rank, None, action, "is missing", f"add it to rank {rank}")
    if sound:
        for channel, (sent, received) in streams.items():
            yield from _channel_disorder(due, seen, channel, sent, received)


def _due_transfers(schedule: Schedule) -> dict[Action, Action]:
    """Every SEND and RECV there must be, each with its partner."""
    due: dict[Action, Action] = {}
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            if not isinstance(action, Action) or action.kind not in COMPUTE:
                continue
            for value in gives(action, schedule.skips):
                peers = transfer_of(value, schedule)
                if peers is not None:
                    due[peers[0]], due[peers[1]] = peers[1], peers[0]
    return due


def _problem(
    schedule: Schedule,
    due: dict[Action, Action],
    seen: dict[Action, tuple[int, int]],
    action: Action,
    rank: int,
) -> tuple[str, str] | None:
    if action in seen:
        first_rank, first = seen[action]
        return "is there twice", f"it is on rank {first_rank} at position {first} already; drop one"
    if action not in due:
        return "carries what nobody on another rank needs", "drop it"
    owner = schedule.rank_of(action.stage, action.microbatch)
    if owner != rank:
        return f"belongs to rank {owner}", "move it there"
    return None


def _broken(
    rule: Rule, rank: int, position: int | None, action: Action, problem: str, remedy: str
) -> Violation:
    return Violation(
        rule=rule,
        rank=rank,
        position=position,
        action=str(action),
        problem=problem,
        remedy=remedy,
        lowered=True,
    )


def _channel_disorder(
    due: dict[Action, Action],
    seen: dict[Action, tuple[int, int]],
    channel: Channel,
    sent: list[Action],
    received: list[Action],
) -> Iterator[Violation]:
    for send, receive in zip(sent, received, strict=True):
        if due[send] != receive:
            rank, position = seen[receive]
            yield Violation(
                rule=Rule.CHANNEL,
                rank=rank,
                position=position,
                action=str(receive),
                problem=f"meets {send} on channel {channel}",
                remedy=f"post {due[send]} there, in the order of the sends",
                lowered=True,
            )
            return  # all that follows is shifted by the first


def find_bad_frees(schedule: Schedule) -> Iterator[Violation]:
    """Frees before the send, twice, of what is still needed, or missing where there are others."""
    has_frees = any(
        isinstance(item, Action) and item.kind in FREES
        for order in schedule.ranks
        for item in order
    )
    if not has_frees:
        return
    for rank, order in enumerate(schedule.ranks):
        yield from _bad_frees_of(schedule, rank, order)


def _bad_frees_of(
    schedule: Schedule, rank: int, order: tuple[AnyAction, ...]
) -> Iterator[Violation]:
    sent: dict[Value, int] = {}
    freed: dict[Value, int] = {}
    for position, item in enumerate(order):
        for action in halves(item):
            if not isinstance(action, Action):
                continue
            for value in needs(action, schedule.num_stages, schedule.skips):
                if action.kind in FREES:
                    problem, remedy = "", ""
                    if value in freed:
                        problem, remedy = "is there twice", f"one is at {freed[value]}; drop one"
                    elif value not in sent:
                        problem, remedy = "before its send", "put it behind the SEND"
                    if problem:
                        yield _broken(Rule.FREE, rank, position, action, problem, remedy)
                    freed[value] = position
                elif value in freed:
                    first = freed[value]
                    remedy = f"the free is at position {first}; move it behind the last use"
                    yield _broken(Rule.FREE, rank, position, action, "uses what was freed", remedy)
                if action.kind in SENDS:
                    sent.setdefault(value, position)
    for value, position in sent.items():
        if value not in freed:
            kind = Kind.FREE_F if order_kind(order, position) is Kind.SEND_F else Kind.FREE_B
            missing = Action(value.stage, kind, value.microbatch, value.target)
            yield _broken(
                Rule.FREE, rank, None, missing, "is missing", f"add it behind position {position}"
            )


def order_kind(order: tuple[AnyAction, ...], position: int) -> Kind | None:
    """The kind of the single action at a position."""
    item = order[position]
    return item.kind if isinstance(item, Action) else None
