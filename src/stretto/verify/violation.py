"""What the verifier says: one value per broken rule."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stretto.errors import InputError


class Rule(enum.Enum):
    """The rules a schedule is held to."""

    ONCE = "each stage and microbatch has one F, and one B or one I with one W"
    OWNER = "an action runs on the rank that the placement gives its stage"
    ORDER = "an action comes after what it needs on its own rank"
    TRANSFER = "a value that crosses ranks has one SEND and one RECV, and no other value has any"
    CHANNEL = "both ends of a channel order its messages alike"
    FREE = "a value is freed once, after its send, and not used afterwards"
    DEADLOCK = "no ranks wait for each other in a circle"
    MEMORY = "a rank holds no more than its limit"


class Transport(str, enum.Enum):
    """How sends behave: the three rules under which a schedule is proved.

    buffered: a SEND is over at once; a consumer waits for its message.
    rendezvous: SEND and RECV are posted and over when both head their queue; one queue per
        communicator and rank, without tags; consumers and the end of the step wait.
    blocking: a SEND keeps its rank until its RECV is posted and heads the channel.
    """

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    BLOCKING = "blocking"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule.

    Args:
        rule: The rule.
        rank: The rank where it shows.
        position: Position in that rank's order (of the lowered program, if `lowered`); None if
            something is missing.
        action: The action, printed.
        problem: What is wrong, in a few words.
        remedy: What would satisfy the rule.
        lowered: Whether the position counts transfers.
    """

    rule: Rule
    rank: int
    position: int | None
    action: str
    problem: str
    remedy: str
    lowered: bool = False

    def __str__(self) -> str:
        program = " of the lowered program" if self.lowered else ""
        where = "" if self.position is None else f", position {self.position}{program}"
        return (
            f"rank {self.rank}{where}: {self.action} {self.problem}\n"
            f"  rule: {self.rule.value}\n"
            f"  {self.remedy}"
        )


def read_transports(transport: Transport | str | None) -> tuple[Transport, ...]:
    """The rules to check: one, or all.

    Raises:
        InputError: there is no such rule.
    """
    if transport is None:
        return tuple(Transport)
    known = [one.value for one in Transport]
    if str(transport) not in known:
        raise InputError(f"transport is {str(transport)!r}; it must be one of {', '.join(known)}")
    return (Transport(str(transport)),)
