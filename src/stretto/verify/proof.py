"""All checks in their order: what a later one takes for granted, an earlier one has proved."""

from __future__ import annotations

from stretto.ir.communicators import Communicators, read_communicators
from stretto.ir.costs import Costs, check_stage_count
from stretto.ir.deps import describe_value
from stretto.ir.schedule import Schedule, compute_only
from stretto.ir.walk import Blocked, walk
from stretto.passes import lower
from stretto.verify.completeness import find_incomplete
from stretto.verify.deadlock import deadlock_violations
from stretto.verify.lowering import lower_for
from stretto.verify.memory import MemoryLimit, find_excess
from stretto.verify.order import find_disorder
from stretto.verify.transfers import find_bad_frees, find_bad_transfers
from stretto.verify.violation import Rule, Transport, Violation, read_transports


def verify(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    transport: Transport | str | None = None,
    memory: MemoryLimit | None = None,
    communicators: Communicators | str = Communicators.PER_DIRECTION,
    batched: bool = True,
) -> tuple[Violation, ...]:
    """Everything that is wrong with a schedule; nothing, if it is proved.

    A schedule without transfers is checked, and then the program that `lower` makes of it (under
    `nccl`, that `lower_for` makes of it); one with transfers as it is.

    Args:
        schedule: Lowered or not.
        costs: For the memory limit; see `peak_memory`.
        transport: The rule of sending to prove it under; None for the three that need no
            communicators: buffered, rendezvous and blocking.
        memory: The most a rank may hold, one number or one per rank; None for no limit.
        communicators: Which channels share a communicator; for `nccl` alone, as the next.
        batched: Whether the transfers between two compute actions are handed over as one unit, or
            one by one.

    Returns:
        The violations, each naming rank, position, action, rule and remedy. Where parts are
        missing or misplaced, waiting is not examined: it could only say the same again.

    Raises:
        InputError: the transport or the communicators are unknown, or costs or limits do not fit
            the schedule.

    Cost: linear in the number of actions.
    """
    rules = read_transports(transport)
    shared_by = read_communicators(communicators)
    if costs is not None:
        check_stage_count(costs, schedule.num_stages)
    found = [*find_incomplete(schedule), *find_disorder(compute_only(schedule))]
    if not found:
        found += _circle(compute_only(schedule))
    if not found:
        needs_communicators = Transport.NCCL in rules
        if schedule.is_lowered:
            program = schedule
        elif needs_communicators:
            program = lower_for(schedule, shared_by, batched=batched)
        else:
            program = lower(schedule)
        streams = shared_by if needs_communicators else Communicators.PER_CHANNEL
        found += [*find_bad_transfers(program, streams), *find_bad_frees(program)]
        if schedule.is_lowered and not found:
            found += find_disorder(program, lowered=True)
        if not found:
            found += [
                one
                for rule in rules
                for one in deadlock_violations(program, rule, shared_by, batched=batched)
            ]
    if memory is not None:
        found += find_excess(schedule, costs, memory)
    return tuple(found)


def _circle(schedule: Schedule) -> tuple[Violation, ...]:
    """Orders that wait for each other whatever the transport."""
    blocked = walk(schedule).blocked
    if not blocked:
        return ()
    first = blocked[0]
    return (
        Violation(
            rule=Rule.DEADLOCK,
            rank=first.rank,
            position=first.position,
            action=str(schedule.ranks[first.rank][first.position]),
            problem="waits for ever, whatever the transport",
            remedy="\n  ".join(_told(schedule, one) for one in blocked),
        ),
    )


def _told(schedule: Schedule, blocked: Blocked) -> str:
    item = schedule.ranks[blocked.rank][blocked.position]
    missing = "; ".join(describe_value(value) for value in blocked.missing)
    return f"rank {blocked.rank} is at position {blocked.position}, {item}, and waits for {missing}"
