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
    """How sends behave: the rules under which a schedule is proved.

    buffered: a SEND is over at once; a consumer waits for its message.
    rendezvous: SEND and RECV are posted and over when both head their channel; consumers and the
        end of the step wait.
    blocking: a SEND keeps its rank until its RECV is posted and heads the channel.
    nccl: as rendezvous, but channels share communicators without tags, and a rank hands its
        transfers over in units (`ir.communicators`). A unit starts when the one before it on its
        communicator has ended on that rank, and ends when all its transfers have. Within a unit
        the transfers to, or from, one rank go in order; others do not wait for each other. The
        rank itself never stands at a transfer.

    Source of `nccl`: NCCL user guide, "Point-to-point communication" and "Group calls";
    pytorch issues 125079 (no tags), 186173 (batches on one communicator stay in order), 195760
    (circles through a communicator that unrelated edges share).
    """

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    BLOCKING = "blocking"
    NCCL = "nccl"

    def __str__(self) -> str:
        return self.value


WITHOUT_COMMUNICATORS = (Transport.BUFFERED, Transport.RENDEZVOUS, Transport.BLOCKING)
"""The rules that know channels only; every schedule is proved under all three by default."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Where a rank stands still, and whom it waits for."""

    rank: int
    position: int
    action: str
    reason: str
    waits_for: int | None


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
    """The rules to check: one, or the three that need no communicators.

    Raises:
        InputError: there is no such rule.
    """
    if transport is None:
        return WITHOUT_COMMUNICATORS
    known = [one.value for one in Transport]
    if str(transport) not in known:
        raise InputError(f"transport is {str(transport)!r}; it must be one of {', '.join(known)}")
    return (Transport(str(transport)),)
