"""Sizes at the edge: few microbatches, one rank, several stages per rank, layers left over.

What goes wrong elsewhere: fewer microbatches than stages hang, as the length of the warmup is not
limited, and the guard added later forbids schedules that were fine; with one stage there are no
gradients; with one stage per rank every stage takes itself for the last; and layers that do not
divide by the stages are left out without a word, or all end up on the last one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import (
    KNOWN,
    OPTIONS,
    close,
    every_schedule,
    flat,
    gradients_here,
    plain_toy,
    toy_depth,
    toy_engine,
    unequal,
)
from reference import gradients_of, plain_step, same_bits, toy_batch, toy_layers
from stretto.errors import InputError, PlacementError
from stretto.ir import Action, Kind, Schedule
from stretto.ir.placement import custom
from stretto.models import by_starts, by_weights, split
from stretto.models.partition import even, uniform_late, weighted
from stretto.runtime import Engine
from stretto.schedules import build, gpipe, one_f_one_b
from stretto.schedules.build import GENERATORS
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss


def compare_sizes(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Every schedule with fewer, as many, and more microbatches than ranks and stages."""
    wrong: list[str] = []
    for m in (1, 2, 3, 5):
        for name, schedule in every_schedule(num_ranks, m):
            depth = toy_depth(schedule)
            engine = toy_engine(rank, group, schedule)
            loss = engine.step(*toy_batch(8)).loss
            if not close(loss, KNOWN[depth][0]):
                wrong.append(f"{name}, m={m}: loss {loss}")
            expected = plain_toy(depth, 8, m).gradients
            wrong += [f"{name}, m={m}: {one}" for one in unequal(engine, expected)]
            engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_number_of_microbatches_runs_on_any_number_of_ranks(num_ranks: int) -> None:
    """1, 2, 3 and 5 microbatches of 8 rows give the known loss and the plain run's gradients."""
    assert flat(run_ranks(compare_sizes, num_ranks, num_ranks, transport="sockets")) == []


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_run_or_refuse_each_size_with_its_numbers(name: str) -> None:
    """Every size gives a schedule of that size, or an error that names generator and number."""
    for num_ranks in (1, 2, 4):
        for m in (0, 1, 2, 3, 5):
            for option in (1, 2):
                taken = {one for one in OPTIONS if one in _parameters(name)}
                options = dict.fromkeys(taken, option)
                try:
                    made = build(name, num_ranks=num_ranks, num_microbatches=m, **options)
                except InputError as error:
                    text = str(error)
                    assert name in text
                    assert f"num_microbatches is {m}" in text or f"is {option}" in text
                    assert m == 0 or name not in ("gpipe", "one_f_one_b")
                else:
                    assert (made.num_ranks, made.num_microbatches) == (num_ranks, m)


def _parameters(name: str) -> Any:
    import inspect

    return inspect.signature(GENERATORS[name]).parameters


def chained(stages_of_rank: list[int], m: int) -> Schedule:
    """One microbatch after the other through all stages and back: the plain run's own order."""
    placement = custom(stages_of_rank)
    count = len(stages_of_rank)
    orders: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for microbatch in range(m):
        for stage in range(count):
            orders[stages_of_rank[stage]].append(Action(stage, Kind.F, microbatch))
        for stage in reversed(range(count)):
            orders[stages_of_rank[stage]].append(Action(stage, Kind.B, microbatch))
    return Schedule(placement=placement, num_microbatches=m, ranks=tuple(map(tuple, orders)))


def compare_placements(rank: int, group: Any) -> list[str]:
    """Hand-made orders on placements of all kinds, with stages next to each other on a rank."""
    wrong: list[str] = []
    for owners in ([0, 1], [1, 0], [0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 1], [0, 1, 0, 0]):
        schedule = chained(owners, 3)
        engine = toy_engine(rank, group, schedule)
        if not close(engine.step(*toy_batch(8)).loss, KNOWN[4][0]):
            wrong.append(f"{owners}: loss")
        wrong += [f"{owners}: {one}" for one in unequal(engine, plain_toy(4, 8, 3).gradients)]
        engine.close()
    return wrong


def test_orders_of_ones_own_run_on_any_placement() -> None:
    """A line, its reverse, a V and unequal shares equal the plain run in every bit."""
    assert flat(run_ranks(compare_placements, 2, transport="sockets")) == []


SPLITS: list[tuple[int, Any]] = [
    (7, "even"),
    (7, "uniform_late"),
    (5, "even"),
    (9, [1, 5, 2, 1]),
    (6, [0, 3, 0, 3]),
    (4, [4, 0, 0, 0]),
    (4, [0, 0, 0, 4]),
    (6, by_starts([0, 1, 1, 4])),
    (6, by_weights([1, 1, 1, 5, 1, 1])),
    (6, "class:Sequential"),
]
"""Number of layers, and how four stages share them."""


def compare_splits(rank: int, group: Any) -> list[Any]:
    """Splits of all kinds, stages without layers among them; also the names each rank holds."""
    wrong: list[str] = []
    held: list[list[str]] = []
    for num_layers, by in SPLITS:
        schedule = build("interleaved_1f1b", num_ranks=2, num_microbatches=3, stages_per_rank=2)
        stages = split(toy_layers(num_layers), schedule, rank=rank, by=by)
        engine = Engine(stages, schedule, loss_fn=MSE, group=group)
        plain = plain_toy(num_layers, 8, 3)
        result = engine.step(*toy_batch(8))
        if not same_bits(result.loss, plain.loss):
            wrong.append(f"{num_layers} layers by {by}: loss {result.loss}")
        wrong += [f"{num_layers} by {by}: {one}" for one in unequal(engine, plain.gradients)]
        held.append(sorted(gradients_here(engine)))
        engine.close()
    return [wrong, held]


def test_no_layer_is_lost_or_run_twice_however_stages_share_them() -> None:
    """Layers that do not divide, stages with none: the plain run's bits, each layer on one rank."""
    answers = run_ranks(compare_splits, 2, transport="sockets")
    assert flat([wrong for wrong, _ in answers]) == []
    for index, (num_layers, _) in enumerate(SPLITS):
        names = [name for _, held in answers for name in held[index]]
        plain = nn.Sequential(*toy_layers(num_layers))
        assert sorted(names) == sorted(name for name, _ in plain.named_parameters())


def test_splits_of_forty_layers_hold_every_layer_once() -> None:
    """1 to 40 layers over 1 to 16 stages; sizes differ by at most one, or weigh the least."""
    for num_stages in [*range(1, 9), *(2 * s for s in range(5, 9))]:
        for num_layers in range(1, 41):
            for rule in (even, uniform_late):
                if num_layers < num_stages:
                    with pytest.raises(InputError, match=f"{num_layers} layers .*{num_stages} st"):
                        rule(num_layers, num_stages)
                    continue
                sizes = rule(num_layers, num_stages)
                assert sum(sizes) == num_layers
                assert len(sizes) == num_stages
                assert max(sizes) - min(sizes) <= 1
    assert sorted(even(30, 4)) == [7, 7, 8, 8]
    assert sorted(even(38, 8)) == [4, 4, *[5] * 6]
    assert sum(even(10, 3)) == 10
    assert weighted([9, 1, 1, 1], 2) == (1, 3)
    assert weighted([1, 1, 1, 9], 2) == (3, 1)


def test_fewer_layers_than_stages_are_refused_on_every_rank() -> None:
    """Both numbers are in the error, before any process talks to another."""
    for name, schedule in every_schedule(4, 2):
        for rank in range(4):
            with pytest.raises(InputError, match=f"3 layers .*{schedule.num_stages} stages"):
                split(toy_layers(3), schedule, rank=rank)
        assert name


class Rows(nn.Module):
    """A layer without parameters, whose output has no gradient to pass on if its input has none."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + 1


def compare_bare(rank: int, group: Any, num_ranks: int) -> list[str]:
    """One microbatch of one row; stages that have nothing to learn first, last and everywhere."""
    wrong: list[str] = []
    for name, schedule in every_schedule(num_ranks, 1):
        for bare in (range(1), range(schedule.num_stages - 1, schedule.num_stages), range(99)):

            def layers(bare: range = bare, count: int = schedule.num_stages) -> list[nn.Module]:
                return [
                    Rows() if index in bare else layer
                    for index, layer in enumerate(toy_layers(count))
                ]

            model = nn.Sequential(*layers())
            inputs, targets = toy_batch(1)
            loss = MSE(model(inputs), targets)
            if loss.requires_grad:
                loss.backward()
            engine = Engine(
                split(layers(), schedule, rank=rank), schedule, loss_fn=MSE, group=group
            )
            if not same_bits(engine.step(inputs, targets).loss, loss.detach()):
                wrong.append(f"{name}, {bare}: loss")
            wrong += [f"{name}, {bare}: {one}" for one in unequal(engine, gradients_of(model))]
            engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_one_row_passes_stages_that_have_nothing_to_learn(num_ranks: int) -> None:
    """Stages without parameters at either end, or all of them, run and pass on what there is."""
    assert flat(run_ranks(compare_bare, num_ranks, num_ranks, transport="sockets")) == []


def construct_wrongly(rank: int, group: Any) -> list[str]:
    """What is told where a rank's stages, or the group, do not fit the schedule."""
    told: list[str] = []
    for schedule in (
        gpipe(num_ranks=3, num_microbatches=2),
        one_f_one_b(num_ranks=1, num_microbatches=2),
    ):
        try:
            toy_engine(0, group, schedule)
            told.append("nothing was raised")
        except InputError as error:
            told.append(str(error))
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    stages = split(toy_layers(4), schedule, rank=0)  # rank 1 is given rank 0's
    try:
        Engine(stages, schedule, loss_fn=MSE, group=group)
        told.append("nothing was raised")
    except InputError as error:
        told.append(str(error))
    return told


def test_what_does_not_fit_is_refused_at_construction_on_every_rank() -> None:
    """Numbers of ranks that differ, and stages of another rank, are named everywhere."""
    first, second = run_ranks(construct_wrongly, 2, transport="sockets")
    for told in (first, second):
        assert "the group has 2 ranks, the schedule 3" in told[0]
        assert "the group has 2 ranks, the schedule 1" in told[1]
        assert "rank 1 was given the stages [0]" in told[2]
    with pytest.raises(PlacementError, match="own no stage"):
        custom([0, 2])


def test_the_plain_run_that_is_compared_with_gives_the_known_numbers() -> None:
    """The reference itself has the independently computed loss, whatever it is cut into."""
    for m in (1, 2, 3, 5):
        plain = plain_step(nn.Sequential(*toy_layers(4)), MSE, *toy_batch(8), m)
        assert close(plain.loss, KNOWN[4][0])
