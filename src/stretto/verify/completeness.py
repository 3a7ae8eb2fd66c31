"""Is everything there, once, and on its rank?"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.action import COMPUTE, Action, Kind, StageAction, halves
from stretto.ir.schedule import Schedule
from stretto.verify.violation import Rule, Violation


def find_incomplete(schedule: Schedule) -> Iterator[Violation]:
    """Missing, repeated and misplaced compute actions.

    A schedule without any backward is a forward-only one and complete without them.
    """
    seen: dict[Action, tuple[int, int]] = {}
    has_backward = False
    for rank, order in enumerate(schedule.ranks):
        for position, item in enumerate(order):
            for action in halves(item):
                if isinstance(action, StageAction):
                    if rank not in {ranks[action.stage] for ranks in schedule.placement.replicas}:
                        yield _misplaced(schedule, action, rank, position, None)
                    continue
                if action.kind not in COMPUTE:
                    continue
                has_backward = has_backward or action.kind is not Kind.F
                owner = schedule.rank_of(action.stage, action.microbatch)
                if owner != rank:
                    yield _misplaced(schedule, action, rank, position, owner)
                if action in seen:
                    first_rank, first = seen[action]
                    yield Violation(
                        rule=Rule.ONCE,
                        rank=rank,
                        position=position,
                        action=str(action),
                        problem="is there twice",
                        remedy=f"it is on rank {first_rank} at position {first} already; drop one",
                    )
                else:
                    seen[action] = (rank, position)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            yield from _missing(schedule, seen, stage, microbatch, has_backward)


def _misplaced(
    schedule: Schedule, action: Action | StageAction, rank: int, position: int, owner: int | None
) -> Violation:
    owners = [ranks[action.stage] for ranks in schedule.placement.replicas]
    right = owners if owner is None else [owner]
    return Violation(
        rule=Rule.OWNER,
        rank=rank,
        position=position,
        action=str(action),
        problem=f"belongs to rank {' or '.join(map(str, right))}",
        remedy="move it there, or change the placement",
    )


def _missing(
    schedule: Schedule,
    seen: dict[Action, tuple[int, int]],
    stage: int,
    microbatch: int,
    has_backward: bool,
) -> Iterator[Violation]:
    f, b, i, w = (Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    rank = schedule.rank_of(stage, microbatch)
    if f not in seen:
        yield _absent(rank, f, "is missing", f"add it to rank {rank}")
    if not has_backward:
        return
    if b in seen and (i in seen or w in seen):
        other = i if i in seen else w
        yield Violation(
            rule=Rule.ONCE,
            rank=seen[b][0],
            position=seen[b][1],
            action=str(b),
            problem=f"is there besides {other}",
            remedy=f"B is I and W in one; drop {b}, or {i} and {w}",
        )
    elif b not in seen and i not in seen and w not in seen:
        yield _absent(rank, b, "is missing", f"add it, or {i} and {w}, to rank {rank}")
    elif b not in seen:
        for one in (i, w):
            if one not in seen:
                yield _absent(rank, one, "is missing", f"add it to rank {rank}")


def _absent(rank: int, action: Action, problem: str, remedy: str) -> Violation:
    return Violation(
        rule=Rule.ONCE,
        rank=rank,
        position=None,
        action=str(action),
        problem=problem,
        remedy=remedy,
    )
