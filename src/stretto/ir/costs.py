"""What actions and messages cost: seconds and bytes, per stage and per link.

Numbers are taken as they come: with integers or fractions every result computed from them is
exact, with floats it is a float.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from stretto.errors import InputError
from stretto.ir.action import Action, Kind, StageAction

Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two ranks.

    Args:
        source: Sending rank.
        target: Receiving rank.
        latency_s: Time a message takes besides its bytes.
        bandwidth_bytes_per_s: None means that bytes cost no time.
    """

    source: int
    target: int
    latency_s: Number = 0
    bandwidth_bytes_per_s: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one microbatch on every stage, and of the links.

    Args:
        forward_s: F of each stage.
        input_s: I of each stage.
        weight_s: W of each stage.
        backward_s: B of each stage; empty means I + W.
        held_bytes: Activation bytes a stage holds from the start of F to the end of I (or B).
        deferred_bytes: Bytes a stage holds from the end of I to the end of W.
        output_bytes: Bytes of each stage's output message; its gradient is as large.
        parameter_bytes: Bytes of each stage's parameters.
        latency_s: Latency of every hop between two ranks that `links` does not name.
        bandwidth_bytes_per_s: Bandwidth of such a hop; None means that bytes cost no time.
        links: Hops that differ.

    Raises:
        InputError: lengths differ, or a cost is negative.
    """

    forward_s: tuple[Number, ...]
    input_s: tuple[Number, ...]
    weight_s: tuple[Number, ...]
    backward_s: tuple[Number, ...] = ()
    held_bytes: tuple[Number, ...] = ()
    deferred_bytes: tuple[Number, ...] = ()
    output_bytes: tuple[Number, ...] = ()
    parameter_bytes: tuple[Number, ...] = ()
    latency_s: Number = 0
    bandwidth_bytes_per_s: Number | None = None
    links: tuple[Link, ...] = ()
    _link_of: dict[tuple[int, int], Link] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int], Link]
    )

    def __post_init__(self) -> None:
        count = len(self.forward_s)
        if count == 0:
            raise InputError("costs need at least one stage; forward_s is empty")
        for name in PER_STAGE_FIELDS:
            values = getattr(self, name)
            required = name in ("input_s", "weight_s")
            if len(values) != count and (values or required):
                raise InputError(
                    f"costs: {name} has {len(values)} entries, forward_s has {count}; "
                    "both need one per stage"
                )
            if not all(value >= 0 for value in values):  # NaN is refused here too
                raise InputError(f"costs: {name} holds a number that is not 0 or more: {values}")
        for link in self.links:
            self._link_of[link.source, link.target] = link
        for hop in (self, *self.links):
            if not hop.latency_s >= 0:
                raise InputError(f"costs: latency_s is {hop.latency_s}; it must be 0 or more")
            if hop.bandwidth_bytes_per_s is not None and not hop.bandwidth_bytes_per_s > 0:
                raise InputError(
                    f"costs: bandwidth_bytes_per_s is {hop.bandwidth_bytes_per_s}; it must be "
                    "positive, or null for no limit"
                )

    @property
    def num_stages(self) -> int:
        """Number of stages the costs are for."""
        return len(self.forward_s)

    def seconds(self, action: Action | StageAction) -> Number:
        """How long an action keeps its rank busy; transfers and frees take none."""
        match action.kind:
            case Kind.F:
                return self.forward_s[action.stage]
            case Kind.I:
                return self.input_s[action.stage]
            case Kind.W:
                return self.weight_s[action.stage]
            case Kind.B:
                if self.backward_s:
                    return self.backward_s[action.stage]
                return self.input_s[action.stage] + self.weight_s[action.stage]
            case _:
                return 0

    def hop_seconds(self, source: int, target: int, stage: int) -> Number:
        """How long a message takes from rank to rank.

        Args:
            source: Sending rank.
            target: Receiving rank; the same rank costs nothing.
            stage: The stage whose output, or whose output's gradient, travels.
        """
        if source == target:
            return 0
        hop = self._link_of.get((source, target), self)
        if hop.bandwidth_bytes_per_s is None or not self.output_bytes:
            return hop.latency_s
        return hop.latency_s + _divide(self.output_bytes[stage], hop.bandwidth_bytes_per_s)


PER_STAGE_FIELDS = (
    "forward_s",
    "input_s",
    "weight_s",
    "backward_s",
    "held_bytes",
    "deferred_bytes",
    "output_bytes",
    "parameter_bytes",
)


def uniform_costs(
    num_stages: int,
    *,
    forward_s: Number = 1,
    input_s: Number = 1,
    weight_s: Number = 1,
    latency_s: Number = 0,
) -> Costs:
    """The same costs for every stage; the defaults are the unit costs (so B = 2)."""
    if num_stages < 1:
        raise InputError(f"num_stages is {num_stages}; costs need at least 1")
    return Costs(
        forward_s=(forward_s,) * num_stages,
        input_s=(input_s,) * num_stages,
        weight_s=(weight_s,) * num_stages,
        latency_s=latency_s,
    )


def parse_number(text: str) -> Number:
    """Read `3`, `3/2` or `0.5`; integers and fractions stay exact.

    Raises:
        InputError: the text is no number.
    """
    for read in (int, Fraction, float) if "/" in text else (int, float):
        try:
            return read(text)
        except (ValueError, ZeroDivisionError):
            continue
    raise InputError(f"{text!r} is not a number; write 3, 3/2 or 0.5")


def _divide(amount: Number, by: Number) -> Number:
    if isinstance(amount, float) or isinstance(by, float):
        return float(amount) / float(by)
    return Fraction(amount) / Fraction(by)


def check_stage_count(costs: Costs, num_stages: int) -> None:
    """Refuse costs made for another number of stages."""
    if costs.num_stages != num_stages:
        raise InputError(
            f"the costs are for {costs.num_stages} stages, the schedule has {num_stages}; "
            "costs need one entry per stage"
        )


def per_stage(values: Sequence[Number], num_stages: int, default: Number) -> tuple[Number, ...]:
    """A per-stage field, or the default for every stage where it is empty."""
    return tuple(values) if values else (default,) * num_stages
