"""What a rank can be told to do, and how it is spelled.

The spelling is that of `torch.distributed.pipelining` (`2F0`, `3SEND_B1`, `(0F7;7B3)OVERLAP_F_B`,
`0UNSHARD`), so that schedules travel between both as text. Kinds torch does not know (`FREE_F`,
`FREE_B`) and transfers over skip connections (`0SEND_F2@3`) follow the same form. Nothing here
knows ranks or dependencies.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TypeAlias

from stretto.errors import ActionSyntaxError, InputError


class Kind(enum.Enum):
    """What an action does to one stage and one microbatch.

    F, B, I, W compute: forward, whole backward, input gradient, weight gradient (B = I + W).
    SEND_F and RECV_F move a stage's output, SEND_B and RECV_B the gradient of a stage's input;
    the stage is always that of the rank that acts. FREE_F and FREE_B give up what was sent, as
    soon as the transfer lets go of it.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the field's letter for the input gradient; reason: standard term)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FREE_F = "FREE_F"
    FREE_B = "FREE_B"

    # members are single objects; an Enum's own hash is that of its name, several times slower
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.value


class StageKind(enum.Enum):
    """What an action does to a whole stage, whatever the microbatch (sharded parameters)."""

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    def __repr__(self) -> str:
        return self.value


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
FREES = frozenset({Kind.FREE_F, Kind.FREE_B})
TRANSFERS = SENDS | RECEIVES | FREES


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of work on one stage and one microbatch; prints as `2F0`.

    Args:
        stage: Index of the stage, from 0.
        kind: What is done.
        microbatch: Index of the microbatch, from 0.
        peer: For a transfer over a skip connection the stage at its other end; None for all else.

    Raises:
        InputError: an index is negative, or a kind that is no transfer has a peer.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.peer is not None and (self.peer < 0 or self.kind not in TRANSFERS):
            raise InputError(f"action {self}: only transfers have a peer, and it is a stage")
        if self.stage < 0 or self.microbatch < 0:
            raise InputError(
                f"action {self}: stage and microbatch are counted from 0 and cannot be negative"
            )

    def __str__(self) -> str:
        peer = "" if self.peer is None else f"@{self.peer}"
        return f"{self.stage}{self.kind.value}{self.microbatch}{peer}"

    def __repr__(self) -> str:
        peer = "" if self.peer is None else f", peer={self.peer}"
        return f"Action(stage={self.stage}, kind={self.kind!r}, microbatch={self.microbatch}{peer})"


@dataclass(frozen=True, slots=True)
class StageAction:
    """One kind of work on a whole stage; prints as `0UNSHARD`."""

    stage: int
    kind: StageKind

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise InputError(f"action {self}: stages are counted from 0 and cannot be negative")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward that an overlapping stage may interleave.

    Prints as `(0F7;7B3)OVERLAP_F_B`. A rank without a joint method runs the forward half, then
    the backward half.

    Raises:
        InputError: the halves are not a forward and a backward of different work.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.kind is not Kind.F or self.backward.kind not in (Kind.B, Kind.I):
            raise InputError(f"pair {self}: the halves must be an F and a B (or I), in this order")
        same_stage = self.forward.stage == self.backward.stage
        if same_stage and self.forward.microbatch == self.backward.microbatch:
            raise InputError(f"pair {self}: the backward needs its own forward to be over")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


AnyAction: TypeAlias = Action | StageAction | Overlap

_KINDS = {kind.value: kind for kind in Kind}
_STAGE_KINDS = {kind.value: kind for kind in StageKind}
_SINGLE = re.compile(r"(\d+)([A-Z_]+)(\d*)(?:@(\d+))?")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse_action(text: str) -> AnyAction:
    """Read one action from its text form.

    Args:
        text: For example `2F0`, `3SEND_B1`, `0SEND_F2@3`, `0UNSHARD` or `(0F7;7B3)OVERLAP_F_B`.

    Raises:
        ActionSyntaxError: the text is none of these.

    Example:
        >>> parse_action("2F0")
        Action(stage=2, kind=F, microbatch=0)
    """
    text = text.strip()
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        forward, backward = _parse_single(pair[1].strip()), _parse_single(pair[2].strip())
        if not isinstance(forward, Action) or not isinstance(backward, Action):
            raise ActionSyntaxError(text, "both halves of a pair need a microbatch")
        return Overlap(forward, backward)
    return _parse_single(text)


def _parse_single(text: str) -> Action | StageAction:
    match = _SINGLE.fullmatch(text)
    if match is None:
        raise ActionSyntaxError(text, "expected stage, kind, microbatch, as in 2F0")
    stage, word, microbatch = int(match[1]), match[2], match[3]
    if word in _STAGE_KINDS:
        if microbatch or match[4] is not None:
            raise ActionSyntaxError(text, f"{word} takes no microbatch and no peer")
        return StageAction(stage, _STAGE_KINDS[word])
    if word not in _KINDS:
        known = ", ".join([*_KINDS, *_STAGE_KINDS])
        raise ActionSyntaxError(text, f"unknown kind {word!r}; known kinds: {known}")
    if not microbatch:
        raise ActionSyntaxError(text, f"{word} needs a microbatch, as in {stage}{word}0")
    peer = None if match[4] is None else int(match[4])
    if peer is not None and _KINDS[word] not in TRANSFERS:
        raise ActionSyntaxError(text, f"{word} is no transfer and takes no peer")
    return Action(stage, _KINDS[word], int(microbatch), peer)


def halves(item: AnyAction) -> tuple[Action | StageAction, ...]:
    """The single actions an item consists of, in the order they run one after the other."""
    if isinstance(item, Overlap):
        return (item.forward, item.backward)
    return (item,)
