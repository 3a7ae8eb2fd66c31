"""`stretto check`: prove a schedule, or say what is wrong with it."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from stretto.cli.options import read_schedule
from stretto.errors import InputError
from stretto.ir import parse_number


def check(
    file: str,
    *,
    transport: Literal["buffered", "rendezvous", "blocking", "nccl"] | None = None,
    communicators: Literal["per_channel", "per_direction", "shared"] | None = None,
    batched: bool = True,
    memory: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Prove a schedule complete, ordered and free of deadlock; exit status 1 if it is not.

    Parameters
    ----------
    file
        A .csv (in torch's spelling) or .json file.
    transport
        How sends behave; buffered, rendezvous and blocking are all proved if none is given.
    communicators
        Under nccl, which messages share a communicator; activations and gradients apart
        (per_direction) if not given.
    batched
        Under nccl, whether transfers without compute between them start together.
    memory
        The most stage activations a rank may hold.
    as_json
        Write the violations as JSON.
    """
    from stretto.verify import peak_memory, verify

    if transport != "nccl" and (communicators is not None or not batched):
        raise InputError("--communicators and --no-batched belong to --transport nccl")
    schedule = read_schedule(file)
    sharing = communicators or "per_direction"
    limit = None if memory is None else parse_number(memory)
    violations = verify(
        schedule, transport=transport, memory=limit, communicators=sharing, batched=batched
    )
    if as_json:
        found = [
            {
                "rule": one.rule.name.lower(),
                "rank": one.rank,
                "position": one.position,
                "action": one.action,
                "problem": one.problem,
                "remedy": one.remedy,
            }
            for one in violations
        ]
        peaks = [str(peak) for peak in peak_memory(schedule)]
        print(json.dumps({"good": not found, "violations": found, "peak_memory": peaks}, indent=1))
    elif violations:
        print("\n".join(str(one) for one in violations))
    else:
        rules = "buffered, rendezvous and blocking" if transport is None else transport
        if transport == "nccl":
            rules += f" ({sharing}, {'batched' if batched else 'one by one'})"
        peaks = " ".join(str(peak) for peak in peak_memory(schedule))
        print(
            f"good: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches; proved for {rules} sends; "
            f"peak per rank {peaks}"
        )
    return 1 if violations else 0
