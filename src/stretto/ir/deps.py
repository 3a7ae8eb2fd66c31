"""What must precede an action: the one rule that verifier, simulator, passes and views ask.

The rule is told through values. An action needs values and gives values; it can run on a rank
once all it needs is there:

    action        needs                                  gives
    sFm           OUTPUT s-1 m          (s > 0)          OUTPUT s m, GRAPH s m
    sBm           GRAPH s m, GRADIENT s+1 m (s < last)   GRADIENT s m
    sIm           GRAPH s m, GRADIENT s+1 m (s < last)   GRADIENT s m, DEFERRED s m
    sWm           DEFERRED s m                           nothing
    sSEND_Fm      OUTPUT s m                             the message to s+1
    sRECV_Fm      nothing (it posts)                     OUTPUT s-1 m, once sent
    sSEND_Bm      GRADIENT s m                           the message to s-1
    sRECV_Bm      nothing (it posts)                     GRADIENT s+1 m, once sent
    sFREE_Fm      OUTPUT s m and its send                nothing
    sFREE_Bm      GRADIENT s m and its send              nothing

GRADIENT s m is the gradient of stage s's input. A value given on a rank is there on that rank
only; between ranks it travels by SEND and RECV, or, in a schedule that is not lowered, by itself.

A skip connection from stage s to stages t1 < t2 < ... adds OUTPUT s m → ti, given by sFm and needed
by tiFm: it goes straight to each user. Its gradient is a chain: the last user's backward gives
GRADIENT tn m → tn-1, each earlier user's backward needs it and gives on its own, and the first
user's goes to s. Transfers of these name the other stage: sSEND_Fm@t, tRECV_Fm@s.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stretto.ir.action import Action, Kind, StageAction
from stretto.ir.schedule import Schedule, Skip


class ValueKind(enum.IntEnum):
    """What passes from action to action."""

    OUTPUT = 0
    GRADIENT = 1
    GRAPH = 2
    DEFERRED = 3


TRAVELS = frozenset({ValueKind.OUTPUT, ValueKind.GRADIENT})
"""The values that a message can carry to another rank; the others stay where they were made."""


class Value(NamedTuple):
    """Something one action gives and another needs, for one stage and microbatch.

    With a `target` it goes to that stage over a skip connection, without one to the neighbour.
    """

    kind: ValueKind
    stage: int
    microbatch: int
    target: int | None = None


class Channel(NamedTuple):
    """An ordered stream of messages: from a rank to a rank, activations (F) or gradients (B)."""

    source: int
    target: int
    direction: str

    def __str__(self) -> str:
        return f"{self.source}->{self.target}{self.direction}"


_WORDS = {
    ValueKind.OUTPUT: "the output of stage {s} for microbatch {m}",
    ValueKind.GRADIENT: "the gradient of stage {s}'s input for microbatch {m}",
    ValueKind.GRAPH: "the forward of stage {s} for microbatch {m}",
    ValueKind.DEFERRED: "the input-gradient pass of stage {s} for microbatch {m}",
}
_SKIP_WORDS = {
    ValueKind.OUTPUT: "the skip values of stage {s} for stage {t}, microbatch {m}",
    ValueKind.GRADIENT: "the gradient of skip values from stage {s} for stage {t}, microbatch {m}",
}


def describe_value(value: Value) -> str:
    """The value in words, for messages."""
    words = _WORDS if value.target is None else _SKIP_WORDS
    return words[value.kind].format(s=value.stage, m=value.microbatch, t=value.target)


def forward_edges(skips: Iterable[Skip]) -> tuple[tuple[int, int], ...]:
    """From which stage to which skip values go; each pair once, ascending."""
    return tuple(sorted({(skip.source, target) for skip in skips for target in skip.targets}))


def gradient_edges(skips: Iterable[Skip]) -> tuple[tuple[int, int], ...]:
    """From which stage to which gradients of skip values go: down each chain of users."""
    chains = [(skip.source, *skip.targets) for skip in skips]
    return tuple(sorted({(high, low) for one in chains for low, high in itertools.pairwise(one)}))


def needs(
    action: Action | StageAction, num_stages: int, skips: Sequence[Skip] = ()
) -> tuple[Value, ...]:
    """The values that must be on the rank before this action can run there."""
    if isinstance(action, StageAction):
        return ()
    s, m = action.stage, action.microbatch
    match action.kind:
        case Kind.F:
            before = (Value(ValueKind.OUTPUT, s - 1, m),) if s > 0 else ()
            edges = forward_edges(skips) if skips else ()
            return before + tuple(
                Value(ValueKind.OUTPUT, source, m, s) for source, target in edges if target == s
            )
        case Kind.B | Kind.I:
            after = (Value(ValueKind.GRADIENT, s + 1, m),) if s < num_stages - 1 else ()
            edges = gradient_edges(skips) if skips else ()
            chained = tuple(
                Value(ValueKind.GRADIENT, high, m, s) for high, low in edges if low == s
            )
            return (Value(ValueKind.GRAPH, s, m), *after, *chained)
        case Kind.W:
            return (Value(ValueKind.DEFERRED, s, m),)
        case Kind.SEND_F | Kind.FREE_F:
            return (Value(ValueKind.OUTPUT, s, m, action.peer),)
        case Kind.SEND_B | Kind.FREE_B:
            return (Value(ValueKind.GRADIENT, s, m, action.peer),)
        case Kind.RECV_F | Kind.RECV_B:
            return ()


def gives(action: Action | StageAction, skips: Sequence[Skip] = ()) -> tuple[Value, ...]:
    """The values that are on the rank once this action is over (a RECV: once sent, too)."""
    if isinstance(action, StageAction):
        return ()
    s, m = action.stage, action.microbatch
    match action.kind:
        case Kind.F:
            edges = forward_edges(skips) if skips else ()
            skipping = tuple(
                Value(ValueKind.OUTPUT, s, m, target) for source, target in edges if source == s
            )
            return (Value(ValueKind.OUTPUT, s, m), *skipping, Value(ValueKind.GRAPH, s, m))
        case Kind.B | Kind.I:
            edges = gradient_edges(skips) if skips else ()
            chained = tuple(
                Value(ValueKind.GRADIENT, s, m, low) for high, low in edges if high == s
            )
            deferred = (Value(ValueKind.DEFERRED, s, m),) if action.kind is Kind.I else ()
            return (Value(ValueKind.GRADIENT, s, m), *chained, *deferred)
        case Kind.RECV_F | Kind.RECV_B:
            value = carried(action)
            return () if value is None else (value,)
        case _:
            return ()


def carried(action: Action) -> Value | None:
    """The value a SEND or RECV moves; None for every other kind."""
    s, m, peer = action.stage, action.microbatch, action.peer
    match action.kind:
        case Kind.SEND_F:
            return Value(ValueKind.OUTPUT, s, m, peer)
        case Kind.SEND_B:
            return Value(ValueKind.GRADIENT, s, m, peer)
        case Kind.RECV_F:
            if peer is not None:
                return Value(ValueKind.OUTPUT, peer, m, s)
            return Value(ValueKind.OUTPUT, s - 1, m)
        case Kind.RECV_B:
            if peer is not None:
                return Value(ValueKind.GRADIENT, peer, m, s)
            return Value(ValueKind.GRADIENT, s + 1, m)
        case _:
            return None


def transfer_of(value: Value, schedule: Schedule) -> tuple[Action, Action] | None:
    """The SEND and RECV that carry a value to the rank that needs it.

    Returns:
        None if nobody needs it elsewhere: an inner value, an end of the pipeline, or both
        stages on one rank.
    """
    if value.kind not in TRAVELS:
        return None
    s, m, target = value.stage, value.microbatch, value.target
    is_output = value.kind is ValueKind.OUTPUT
    other = (s + 1 if is_output else s - 1) if target is None else target
    if not 0 <= other < schedule.num_stages:
        return None
    if schedule.rank_of(s, m) == schedule.rank_of(other, m):
        return None
    send, receive = (Kind.SEND_F, Kind.RECV_F) if is_output else (Kind.SEND_B, Kind.RECV_B)
    peer = None if target is None else s
    return Action(s, send, m, target), Action(other, receive, m, peer)


def edge_of(action: Action) -> tuple[int, int]:
    """From which stage to which a SEND or RECV carries its value."""
    value = carried(action)
    if value is None:
        raise ValueError(f"{action} is no transfer")
    if value.target is not None:
        return value.stage, value.target
    return value.stage, value.stage + (1 if value.kind is ValueKind.OUTPUT else -1)


def channel_of(action: Action, schedule: Schedule) -> Channel:
    """The channel of a SEND or RECV, by where the schedule's placement puts both stages."""
    last = schedule.num_stages - 1  # a message past the ends has no channel: verify rejects it
    source, target = (min(max(stage, 0), last) for stage in edge_of(action))
    direction = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
    m = action.microbatch
    return Channel(schedule.rank_of(source, m), schedule.rank_of(target, m), direction)
