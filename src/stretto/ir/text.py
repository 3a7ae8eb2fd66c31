"""Schedules as lines of actions, and as CSV in torch's spelling.

Both forms have one line per rank. CSV holds what torch's runtime can run, and nothing else: it
has no placement of its own (the rank whose line computes a stage owns it), no replicas and no
FREE. Everything goes into the JSON form (`ir.files`).
"""

from __future__ import annotations

import csv
import io

from stretto.errors import FormatError, InputError
from stretto.ir.action import COMPUTE, FREES, Action, AnyAction, StageAction, halves, parse_action
from stretto.ir.placement import Placement, custom
from stretto.ir.schedule import Schedule


def format_orders(schedule: Schedule) -> str:
    """One line per rank, actions separated by one space."""
    return "\n".join(" ".join(str(item) for item in order) for order in schedule.ranks) + "\n"


def parse_orders(text: str, *, placement: Placement | None = None) -> Schedule:
    """Read lines of actions separated by white space, one line per rank.

    Args:
        text: The lines; empty lines are rank orders too, except at the end.
        placement: Stage → rank; by default the rank whose line computes a stage owns it.

    Raises:
        InputError: the text has no action, or a stage is computed on two ranks.
        ActionSyntaxError: a word is no action.
    """
    lines = text.rstrip().splitlines()
    return _schedule([line.split() for line in lines], placement)


def to_csv(schedule: Schedule) -> str:
    """The schedule in the CSV form that torch's pipeline runtime loads.

    Raises:
        FormatError: the schedule has replicas or FREE actions, which torch cannot run.
    """
    if schedule.placement.num_replicas > 1:
        raise FormatError("CSV cannot hold replicas of a stage; write the schedule as JSON")
    if schedule.skips:
        raise FormatError("CSV cannot hold skip connections; write the schedule as JSON")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank, order in enumerate(schedule.ranks):
        for item in order:
            if isinstance(item, Action) and item.kind in FREES:
                raise FormatError(
                    f"CSV cannot hold rank {rank}'s {item}; write JSON, or do not lower"
                )
        writer.writerow([str(item) for item in order])
    return out.getvalue()


def from_csv(text: str) -> Schedule:
    """Read a schedule from CSV: one row per rank, empty cells are skipped.

    The number of microbatches is one more than the largest index. Some files of other programs
    count microbatches from 1 in a row; they read as they are, and `verify` names what is missing.

    Raises:
        FormatError: there is no row.
        ActionSyntaxError: a cell is no action.
        InputError: a stage is computed on two ranks, or no rank computes it.
    """
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise FormatError("the CSV has no row; a schedule needs one row per rank")
    return _schedule([[cell for cell in row if cell.strip()] for row in rows], None)


def _schedule(words: list[list[str]], placement: Placement | None) -> Schedule:
    ranks = tuple(tuple(parse_action(word) for word in line) for line in words)
    microbatches = [
        action.microbatch
        for order in ranks
        for item in order
        for action in halves(item)
        if isinstance(action, Action)
    ]
    if not microbatches:
        raise InputError("the text holds no action; a schedule needs at least one forward")
    return Schedule(
        placement=_owners(ranks) if placement is None else placement,
        num_microbatches=max(microbatches) + 1,
        ranks=ranks,
    )


def _owners(ranks: tuple[tuple[AnyAction, ...], ...]) -> Placement:
    owner: dict[int, int] = {}
    for rank, order in enumerate(ranks):
        for item in order:
            for action in halves(item):
                if isinstance(action, StageAction) or action.kind not in COMPUTE:
                    continue
                if owner.setdefault(action.stage, rank) != rank:
                    raise InputError(
                        f"rank {rank}: {action}, but stage {action.stage} is computed on rank "
                        f"{owner[action.stage]} too; without a placement a stage has one rank"
                    )
    missing = sorted(set(range(max(owner) + 1)) - set(owner)) if owner else [0]
    if missing:
        raise InputError(f"no rank computes stages {missing}; every stage up to the last needs one")
    return custom([owner[stage] for stage in range(len(owner))], num_ranks=len(ranks))
