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
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from stretto.ir.action import Action, Kind, StageAction
from stretto.ir.schedule import Schedule


class ValueKind(enum.IntEnum):
    """What passes from action to action."""

    OUTPUT = 0
    GRADIENT = 1
    GRAPH = 2
    DEFERRED = 3


TRAVELS = frozenset({ValueKind.OUTPUT, ValueKind.GRADIENT})
"""The values that a message can carry to another rank; the others stay where they were made."""


class Value(NamedTuple):
    """Something one action gives and another needs, for one stage and microbatch."""

    kind: ValueKind
    stage: int
    microbatch: int


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


def describe_value(value: Value) -> str:
    """The value in words, for messages."""
    return _WORDS[value.kind].format(s=value.stage, m=value.microbatch)


def needs(action: Action | StageAction, num_stages: int) -> tuple[Value, ...]:
    """The values that must be on the rank before this action can run there."""
    if isinstance(action, StageAction):
        return ()
    s, m = action.stage, action.microbatch
    match action.kind:
        case Kind.F:
            return (Value(ValueKind.OUTPUT, s - 1, m),) if s > 0 else ()
        case Kind.B | Kind.I:
            graph = Value(ValueKind.GRAPH, s, m)
            if s == num_stages - 1:
                return (graph,)
            return (graph, Value(ValueKind.GRADIENT, s + 1, m))
        case Kind.W:
            return (Value(ValueKind.DEFERRED, s, m),)
        case Kind.SEND_F | Kind.FREE_F:
            return (Value(ValueKind.OUTPUT, s, m),)
        case Kind.SEND_B | Kind.FREE_B:
            return (Value(ValueKind.GRADIENT, s, m),)
        case Kind.RECV_F | Kind.RECV_B:
            return ()


def gives(action: Action | StageAction) -> tuple[Value, ...]:
    """The values that are on the rank once this action is over (a RECV: once sent, too)."""
    if isinstance(action, StageAction):
        return ()
    s, m = action.stage, action.microbatch
    match action.kind:
        case Kind.F:
            return (Value(ValueKind.OUTPUT, s, m), Value(ValueKind.GRAPH, s, m))
        case Kind.B:
            return (Value(ValueKind.GRADIENT, s, m),)
        case Kind.I:
            return (Value(ValueKind.GRADIENT, s, m), Value(ValueKind.DEFERRED, s, m))
        case Kind.RECV_F:
            return (Value(ValueKind.OUTPUT, s - 1, m),)
        case Kind.RECV_B:
            return (Value(ValueKind.GRADIENT, s + 1, m),)
        case _:
            return ()


def carried(action: Action) -> Value | None:
    """The value a SEND or RECV moves; None for every other kind."""
    s, m = action.stage, action.microbatch
    match action.kind:
        case Kind.SEND_F:
            return Value(ValueKind.OUTPUT, s, m)
        case Kind.SEND_B:
            return Value(ValueKind.GRADIENT, s, m)
        case Kind.RECV_F:
            return Value(ValueKind.OUTPUT, s - 1, m)
        case Kind.RECV_B:
            return Value(ValueKind.GRADIENT, s + 1, m)
        case _:
            return None


def transfer_of(value: Value, schedule: Schedule) -> tuple[Action, Action] | None:
    """The SEND and RECV that carry a value to the rank that needs it.

    Returns:
        None if nobody needs it elsewhere: an inner value, an end of the pipeline, or both
        stages on one rank.
    """
    s, m = value.stage, value.microbatch
    if value.kind is ValueKind.OUTPUT and s + 1 < schedule.num_stages:
        send, receive = Action(s, Kind.SEND_F, m), Action(s + 1, Kind.RECV_F, m)
    elif value.kind is ValueKind.GRADIENT and s > 0:
        send, receive = Action(s, Kind.SEND_B, m), Action(s - 1, Kind.RECV_B, m)
    else:
        return None
    if schedule.rank_of(send.stage, m) == schedule.rank_of(receive.stage, m):
        return None
    return send, receive


def channel_of(action: Action, schedule: Schedule) -> Channel:
    """The channel of a SEND or RECV, by where the schedule's placement puts both stages."""
    value = carried(action)
    if value is None:
        raise ValueError(f"{action} is no transfer")
    peers = transfer_of(value, schedule)
    s, m = value.stage, value.microbatch
    direction = "F" if value.kind is ValueKind.OUTPUT else "B"
    if peers is None:  # a message to oneself or past the ends: verify rejects it
        target = min(max(s + (1 if direction == "F" else -1), 0), schedule.num_stages - 1)
        return Channel(schedule.rank_of(s, m), schedule.rank_of(target, m), direction)
    send, receive = peers
    return Channel(schedule.rank_of(send.stage, m), schedule.rank_of(receive.stage, m), direction)
