"""Pipelines on parts of a job: disjoint groups, ranks that are not the job's, engines side by side.

What goes wrong elsewhere: the rank within the pipeline is taken for the rank within the job; with
two ranks, where the next one is the previous one, messages of the two directions are mistaken for
each other; state is held by a class or a module, so that two pipelines of one process share it;
and giving up one engine takes the user's own groups with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from every_schedule import (
    KNOWN,
    RAGGED,
    close,
    every_schedule,
    flat,
    plain_toy,
    toy_depth,
    toy_engine,
    unequal,
)
from reference import toy_batch
from stretto.errors import InputError
from stretto.ir import Kind
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks

PARTS = ([0, 3], [1, 2])
"""Global ranks of two pipelines in one job."""


def run_side_by_side(rank: int, world: Any) -> list[str]:
    """Both pipelines of a job at once, on every schedule, with other batches on each."""
    wrong: list[str] = []
    groups = [dist.new_group(part) for part in PARTS]  # called by all ranks, as torch wants it
    mine = next(index for index, part in enumerate(PARTS) if rank in part)
    own_rank = PARTS[mine].index(rank)
    rows = (8, 10)[mine]
    for name, schedule in every_schedule(2, 4):
        engine = toy_engine(own_rank, groups[mine], schedule)
        if (engine.rank, engine.num_ranks) != (own_rank, 2):
            wrong.append(f"{name}: rank {engine.rank} of {engine.num_ranks}")
        for _ in range(1 + mine):  # the two do not keep step with each other
            for stage in engine.stages.values():
                stage.zero_grad()
            result = engine.step(*toy_batch(rows))
            engine.eval_step(*toy_batch(rows + mine))
        expected = plain_toy(toy_depth(schedule), rows, 4)
        if not close(result.loss, expected.loss.item()):
            wrong.append(f"{name}: loss {result.loss}")
        wrong += [f"{name}: {one}" for one in unequal(engine, expected.gradients)]
        norm = engine.clip_grad_norm_(1e9)
        if toy_depth(schedule) == 4 and not close(norm, (KNOWN[4][1], RAGGED[1])[mine]):
            wrong.append(f"{name}: norm {norm}")
        engine.close()
    # the user's groups are whole, and the one of others is refused
    for group, part in zip(groups, PARTS, strict=True):
        if rank in part:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            if total.item() != 2:
                wrong.append(f"the group {part} does not work any more")
        else:
            try:
                toy_engine(0, group, build("gpipe", num_ranks=2, num_microbatches=1))
                wrong.append("a group without this rank was taken")
            except InputError:
                pass
    dist.barrier()
    return wrong


def test_two_pipelines_of_one_job_do_not_meet() -> None:
    """Ranks 0 and 3, and 1 and 2, of four processes each get their own known numbers."""
    assert flat(run_ranks(run_side_by_side, 4, transport="gloo")) == []


def run_on_mesh(rank: int, world: Any) -> list[str]:
    """A pipeline along each axis of a two-dimensional mesh, whose ranks are dealt crosswise."""
    wrong: list[str] = []
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("pp", "dp"))
    for axis in ("pp", "dp"):
        for name, schedule in every_schedule(2, 4):
            sub = mesh[axis]
            engine = toy_engine(sub.get_local_rank(), sub, schedule)
            if not close(engine.step(*toy_batch(8)).loss, KNOWN[toy_depth(schedule)][0]):
                wrong.append(f"{name}, {axis}: loss")
            expected = plain_toy(toy_depth(schedule), 8, 4).gradients
            wrong += [f"{name}, {axis}: {one}" for one in unequal(engine, expected)]
            engine.close()
    try:
        toy_engine(0, mesh, schedule)
        wrong.append("a mesh of two dimensions was taken")
    except InputError as error:
        if "one-dimensional" not in str(error):
            wrong.append(str(error))
    return wrong


def test_a_pipeline_runs_along_an_axis_of_a_mesh() -> None:
    """Two pipelines at a time along either axis, each with the right loss and gradients."""
    assert flat(run_ranks(run_on_mesh, 4, transport="gloo")) == []


def take_turns(rank: int, group: Any) -> list[str]:
    """Engines of all schedules alive at once on the same ranks, in turn; then closed one by one."""
    wrong: list[str] = []
    engines = [
        (f"{name}, m={m}", m, toy_engine(rank, group, schedule, seed=m))
        for m in (2, 5)
        for name, schedule in every_schedule(2, m)
    ]
    for rows in (10, 8):
        for name, m, engine in engines:
            engine.eval_step(*toy_batch(7))
            loss = engine.step(*toy_batch(rows)).loss
            expected = plain_toy(toy_depth(engine.schedule), rows, m)
            if not close(loss, expected.loss.item()):
                wrong.append(f"{name}, {rows} rows: {loss}")
            wrong += [f"{name}, {rows}: {one}" for one in unequal(engine, expected.gradients)]
            for stage in engine.stages.values():
                stage.zero_grad()
    for name, m, engine in engines:
        expected = plain_toy(toy_depth(engine.schedule), 8, m).loss.item()
        if not close(engine.step(*toy_batch(8)).loss, expected):
            wrong.append(f"{name}: after others were closed")
        engine.close()
    return wrong


def test_engines_alive_at_once_do_not_mix() -> None:
    """Fourteen engines of two ranks, in turn, each with its own numbers."""
    assert flat(run_ranks(take_turns, 2, transport="gloo")) == []


def see_channels(rank: int, group: Any) -> list[str]:
    """The transfers of lowered schedules on two ranks: no edge of a rank with itself."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        engine: Engine = toy_engine(rank, group, schedule)
        for here in range(2):
            for action in engine.program.actions(here):
                if action.kind not in (Kind.SEND_F, Kind.SEND_B):
                    continue
                other = action.stage + (1 if action.kind is Kind.SEND_F else -1)
                if not 0 <= other < schedule.num_stages:
                    wrong.append(f"{name}: {action} goes past the ends")
                elif schedule.placement.rank_of(other) == here:
                    wrong.append(f"{name}: {action} stays on its rank")
        engine.close()
    return wrong


def test_nothing_is_sent_past_the_ends_or_to_oneself() -> None:
    """With two ranks in a ring, every transfer goes to a neighbouring stage on the other one."""
    assert flat(run_ranks(see_channels, 2, transport="gloo")) == []
