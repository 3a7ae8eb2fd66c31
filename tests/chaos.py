"""Pipelines of four processes in which one rank dies, breaks or freezes at one of its actions."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from reference import gradients_of, toy_batch, toy_layers
from stretto.errors import ExecutionError, HangError
from stretto.ir import Schedule
from stretto.models import split
from stretto.passes import lower
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks

NUM_RANKS = 4
LIMIT_S = 2.0
"""How soon every waiting rank must have ended its step."""
DEADLINE_S = 1.0
"""How long a rank waits for a frozen one."""
FROZEN_S = 4.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong where: `kill`, `raise`, `freeze` (the process), `stick` (its main thread)."""

    kind: str
    rank: int
    index: int
    schedule: str = "one_f_one_b"


def schedule_of(fault: Fault) -> Schedule:
    """A short run: four microbatches."""
    options = {} if fault.schedule in ("gpipe", "one_f_one_b") else {"stages_per_rank": 2}
    return build(fault.schedule, num_ranks=NUM_RANKS, num_microbatches=4, **options)


def make_engine(rank: int, group: Any, schedule: Schedule, **options: Any) -> Engine:
    """An engine of the toy model, with two layers per stage."""
    stages = split(toy_layers(2 * schedule.num_stages), schedule, rank=rank)
    return Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group, **options)


def strike(fault: Fault, folder: Path) -> None:
    """Do it, and note when, on the clock that all processes share."""
    (folder / "struck").write_text(str(time.monotonic()))
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "raise":
        raise ValueError("boom")
    if fault.kind == "stick":
        time.sleep(FROZEN_S)
    if fault.kind == "freeze":
        frozen = os.getpid()
        if os.fork() == 0:
            time.sleep(FROZEN_S)
            os.kill(frozen, signal.SIGCONT)
            os._exit(0)
        os.kill(frozen, signal.SIGSTOP)


def plant(engine: Engine, fault: Fault, folder: Path) -> None:
    """Have the engine's next step strike at the given action."""
    executor: Any = engine._executor
    seen = 0

    def with_fault(handler: Any) -> Any:
        def handle(action: Any) -> None:
            nonlocal seen
            if seen == fault.index:
                with executor._named(action):
                    strike(fault, folder)
            seen += 1
            handler(action)

        return handle

    executor._handlers = {kind: with_fault(one) for kind, one in executor._handlers.items()}


def bits_of(engine: Engine) -> list[Any]:
    """The gradients, exactly."""
    found = {index: gradients_of(stage) for index, stage in engine.stages.items()}
    return [
        [index, name, one.tolist()] for index, all_ in found.items() for name, one in all_.items()
    ]


def forget_gradients(engine: Engine) -> None:
    """As an optimizer's zero_grad."""
    for stage in engine.stages.values():
        stage.zero_grad()


def take_step(rank: int, group: Any, fault: Fault, folder: Path) -> None:
    """Step into the fault, note what was raised, and try another step."""
    schedule = schedule_of(fault)
    engine = make_engine(rank, group, schedule, step_timeout_s=30)
    batch = toy_batch(8)
    engine.step(*batch)
    fresh = bits_of(engine)
    engine.close()
    deadline = DEADLINE_S if fault.kind in ("freeze", "stick") else 30.0
    engine = make_engine(rank, group, schedule, step_timeout_s=deadline)
    if rank == fault.rank:
        plant(engine, fault, folder)
    note: dict[str, Any] = {"error": None}
    try:
        engine.step(*batch)
    except ExecutionError as error:
        note |= {
            "error": type(error).__name__,
            "text": str(error),
            "rank": error.rank,
            "action": error.action,
            "trace": getattr(error, "trace", ""),
            "report": error.report if isinstance(error, HangError) else {},
        }
    note["time"] = time.monotonic()
    forget_gradients(engine)
    try:
        engine.step(*batch)
        note["next"] = "the same bits" if bits_of(engine) == fresh else "other bits"
    except ExecutionError as error:
        note["next"] = f"{type(error).__name__}: {error}"
    (folder / f"rank {rank}").write_text(json.dumps(note))


def run_with(fault: Fault, transport: str, folder: Path) -> tuple[float, dict[int, Any]]:
    """When it struck, and what each rank that is left has noted."""
    is_dead = pytest.raises(ExecutionError, match=f"^rank {fault.rank} died without an answer$")
    with is_dead if fault.kind == "kill" else nullcontext():
        run_ranks(take_step, NUM_RANKS, fault, folder, transport=transport, timeout_s=30)
    struck = float((folder / "struck").read_text())
    ranks = [rank for rank in range(NUM_RANKS) if (folder / f"rank {rank}").exists()]
    return struck, {rank: json.loads((folder / f"rank {rank}").read_text()) for rank in ranks}


def check(fault: Fault, transport: str, folder: Path) -> None:
    """All other ranks end in time, with the right name; the next step is right or refused."""
    action = str(schedule_actions(fault)[fault.index])
    struck, notes = run_with(fault, transport, folder)
    expected = set(range(NUM_RANKS)) - ({fault.rank} if fault.kind == "kill" else set())
    assert set(notes) == expected
    limit = LIMIT_S + (DEADLINE_S if fault.kind in ("freeze", "stick") else 0)
    others = {rank: note for rank, note in notes.items() if rank != fault.rank}
    for rank, note in others.items():
        assert note["error"] is not None, (rank, "ended its step")
        assert note["time"] - struck < limit, (rank, note)
    if fault.kind == "raise":
        mine = notes[fault.rank]
        assert mine["error"] == "StageError"
        assert mine["action"] == action
        for note in others.values():
            assert note["error"] == "RemoteError", note
            assert (note["text"], note["rank"]) == (mine["text"], fault.rank)
            assert note["action"] == action
            assert "ValueError: boom" in note["trace"]
        assert all(note["next"] == "the same bits" for note in notes.values()), notes
    elif fault.kind == "kill":
        for note in others.values():
            assert note["text"].startswith(f"rank {fault.rank} has died"), note
            assert note["rank"] == fault.rank
            assert note["next"].startswith("EngineClosedError")
            assert f"rank {fault.rank} has died" in note["next"]
    else:
        reports = [note["report"] for note in others.values() if note["report"]]
        assert any(note["error"] == "HangError" for note in others.values())
        for report in reports:
            assert list(report) == [str(rank) for rank in range(NUM_RANKS)]
            if fault.kind == "stick":
                assert f"at {action} for" in report[str(fault.rank)]
            else:
                assert "does not answer" in report[str(fault.rank)]
        for note in others.values():
            assert f"held up by rank {fault.rank}, " in note["text"], note
            assert note["next"].startswith("EngineClosedError")
        assert notes[fault.rank]["error"] in ("RemoteError", "HangError")


def schedule_actions(fault: Fault) -> list[Any]:
    """What the rank of the fault runs."""
    return list(lower(schedule_of(fault)).actions(fault.rank))
