"""Where a batch comes from: given on some ranks, drawn from iterators or functions, or sent by one.

What goes wrong elsewhere: the first and the last rank draw from loaders of their own, and with
random data inputs meet labels of other rows; a shared iterator is advanced twice per step, or ahead
of it; one rank's loader ends earlier and the others hang; an error in a data set is seen on one
rank, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from every_schedule import (
    KNOWN,
    close,
    every_schedule,
    flat,
    gradients_here,
    some_schedules,
    toy_depth,
    toy_engine,
)
from reference import gradients_of, same_bits, toy_batch, toy_layer
from stretto.errors import EndOfData, InputError
from stretto.models import split
from stretto.runtime import Engine
from stretto.schedules import build
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss


class Same(nn.Module):
    """The identity, with a parameter that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.factor


class Loader:
    """Batches with random content at each access, another on every rank; targets = inputs."""

    def __init__(self, rank: int, length: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.left = length
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.asked += 1
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        rows = torch.rand((4, 3), generator=self.generator)
        return rows, rows.clone()


def draw_from_one(rank: int, group: Any) -> list[str]:
    """Random data of one rank, on every schedule, for every choice of that rank."""
    wrong: list[str] = []
    for name, schedule in every_schedule(3, 4):
        for data_rank in range(3):
            stages = {stage: Same() for stage in schedule.placement.stages_of(rank)}
            engine = Engine(stages, schedule, loss_fn=MSE, group=group, data_rank=data_rank)
            loader = Loader(rank, 3)
            losses = [engine.step(loader).loss.item(), engine.eval_step(loader).loss.item()]
            losses.append(engine.step(loader.__next__).loss.item())
            if losses != [0.0] * 3:
                wrong.append(f"{name}, rank {data_rank}: inputs met other targets: {losses}")
            if loader.asked != (3 if rank == data_rank else 0):
                wrong.append(
                    f"{name}, rank {data_rank}: rank {rank} was asked {loader.asked} times"
                )
            try:
                engine.step(loader)
                wrong.append(f"{name}: the end of the data was not seen")
            except EndOfData as error:
                if error.ranks != (data_rank,):
                    wrong.append(f"{name}: the data of {error.ranks} has ended")
            engine.close()
    return wrong


def test_one_rank_feeds_all_with_data_that_belongs_together() -> None:
    """The identity has loss 0 on random data whichever rank draws it; others are not asked."""
    assert flat(run_ranks(draw_from_one, 3, transport="sockets")) == []


def end_in_turn(rank: int, group: Any) -> list[str]:
    """Loaders of other lengths on each rank; then the next epoch."""
    wrong: list[str] = []
    for name, schedule in every_schedule(3, 4):
        stages = {stage: Same() for stage in schedule.placement.stages_of(rank)}
        engine = Engine(stages, schedule, loss_fn=MSE, group=group)
        for lengths in ((2, 4, 4), (4, 1, 4), (3, 3, 0), (2, 2, 2)):
            loader = Loader(0, lengths[rank])
            steps, ended = 0, None
            while ended is None:
                try:
                    loss = engine.step(loader).loss.item()
                    steps += 1
                    if loss != 0.0:
                        wrong.append(f"{name}, {lengths}: loss {loss}")
                except EndOfData as error:
                    ended = error.ranks
            expected = tuple(r for r, length in enumerate(lengths) if length == min(lengths))
            if (steps, ended) != (min(lengths), expected):
                wrong.append(f"{name}, {lengths}: {steps} steps, then {ended}")
        if engine.step_number != 2 + 1 + 0 + 2:
            wrong.append(f"{name}: {engine.step_number} steps were counted")
        engine.close()
    return wrong


def test_the_end_of_any_ranks_data_is_seen_by_all_in_the_same_step() -> None:
    """The shortest loader ends the epoch on every rank, and the next one may follow."""
    assert flat(run_ranks(end_in_turn, 3, transport="sockets")) == []


class Counting:
    """A source that says how often it was asked, and what for."""

    def __init__(self, batches: list[Any], log: list[str]) -> None:
        self.batches = batches
        self.asked = 0
        self.log = log

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.asked += 1
        self.log.append("asked")
        return self.batches[(self.asked - 1) % len(self.batches)]


def ask_once(rank: int, group: Any) -> list[str]:
    """How often and when sources are asked; results equal those of given batches."""
    wrong: list[str] = []
    batches = [toy_batch(8), toy_batch(10)]
    for name, schedule in every_schedule(2, 4):
        engine = toy_engine(rank, group, schedule)
        log: list[str] = []
        engine.register_hook("before_forward", lambda event, log=log: log.append("forward"))
        expected = [engine.step(*batch).loss.item() for batch in batches]
        log.clear()
        source = Counting(batches, log)
        sources: list[Any] = [source, source, partial(next, source), lambda s=source: list(next(s))]
        for count, one in enumerate(sources, start=1):
            loss = engine.step(one).loss.item()
            if loss != expected[(count - 1) % 2] or source.asked != count:
                wrong.append(f"{name}: loss {loss}, asked {source.asked} times in {count} steps")
        each = ["asked"] + ["forward"] * 4 * len(schedule.placement.stages_of(rank))
        if log != each * 4:
            wrong.append(f"{name}: asked in the midst of a step: {log}")
        engine.close()
    return wrong


def test_sources_are_asked_once_per_step_at_its_start() -> None:
    """No rank reads ahead or twice, also where it holds the first stage and the last."""
    assert flat(run_ranks(ask_once, 2, transport="sockets")) == []


class Shifted(nn.Module):
    """A toy layer that may be told to add something."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = toy_layer(index)

    def forward(self, h: torch.Tensor, shift: Any = 0.0, table: Any = None) -> torch.Tensor:
        h = self.layer(h) + shift
        return h if table is None else h * table["factor"]


def compare_givers(rank: int, group: Any, num_ranks: int) -> list[str]:
    """One batch with extras and marks, given in every way; gradients of inputs wanted."""
    wrong: list[str] = []
    inputs, targets = toy_batch(10)
    shift = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None]
    table = {"factor": torch.full((4,), 0.5, dtype=torch.float64), "name": "half"}
    for name, schedule in some_schedules(num_ranks, 4):
        depth = toy_depth(schedule)
        model = nn.ModuleList(map(Shifted, range(depth)))
        x = inputs.clone().requires_grad_()
        cuts = (one.tensor_split(4) for one in (x, targets, shift))
        for piece, t, s in zip(*cuts, strict=True):
            h = piece
            for layer in model:
                h = layer(h, s, table)
            (MSE(h, t) / (10 / len(t))).backward()
        first = schedule.placement.rank_of(0) == rank
        last = schedule.placement.rank_of(schedule.num_stages - 1) == rank
        given = inputs.clone().requires_grad_()
        extras = {"shift": shift, "table": stretto.whole(table)}
        whole_batch = (given, targets, extras)
        listed = (
            list(given.tensor_split(4)),
            targets,
            {"shift": list(shift.tensor_split(4)), "table": stretto.whole(table)},
        )
        ways: dict[str, tuple[int | None, Any, Any, dict[str, Any]]] = {
            "on all ranks": (None, given, targets, extras),
            "where needed": (None, given if first else None, targets if last else None, extras),
            "drawn on all": (None, iter([whole_batch]), None, {}),
            "drawn, extras given": (None, lambda b=whole_batch: b[:2], None, extras),
        }
        for source in {0, num_ranks - 1}:
            mine = rank == source
            ways |= {
                f"sent by {source}": (
                    source,
                    given if mine else None,
                    targets if mine else None,
                    extras if mine else {},
                ),
                f"drawn by {source}": (source, iter([whole_batch if mine else None]), None, {}),
                f"listed by {source}": (source, iter([listed if mine else None]), None, {}),
                f"others ignored but {source}": (
                    source,
                    given if mine else "what is this",
                    targets if mine else object(),
                    extras if mine else {"shift": object()},
                ),
            }
        for data_rank in dict.fromkeys(way[0] for way in ways.values()):
            stages = split([Shifted(index) for index in range(depth)], schedule, rank=rank)
            engine = Engine(stages, schedule, loss_fn=MSE, group=group, data_rank=data_rank)
            for how, (source, batch, target, more) in ways.items():
                if source != data_rank:
                    continue
                result = engine.step(batch, target, return_input_gradients=True, **more)
                expected = gradients_of(model)
                wrong += [
                    f"{name}, {how}: {key}"
                    for key, gradient in gradients_here(engine).items()
                    if not same_bits(gradient, expected[key])
                ]
                if first:
                    found = result.input_gradients
                    found = torch.cat(found) if isinstance(found, list) else found
                    if found is None or not same_bits(found, x.grad):
                        wrong.append(f"{name}, {how}: gradients of the inputs")
                for stage in engine.stages.values():
                    stage.zero_grad()
            engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_means_the_same_however_it_is_given(num_ranks: int) -> None:
    """Given, drawn or sent, in one piece or listed, with extras and marks: the same bits."""
    assert flat(run_ranks(compare_givers, num_ranks, num_ranks, transport="sockets")) == []


class Broken:
    """A source that fails in its own way the second time it is asked."""

    def __init__(self, item: Any, error: Exception | None = None) -> None:
        self.item, self.error, self.asked = item, error, 0

    def __call__(self) -> Any:
        self.asked += 1
        if self.asked == 2:
            if self.error is not None:
                raise self.error
            return self.item
        return toy_batch(8)


BROKEN: list[tuple[Any, Exception | None, str]] = [
    (None, KeyError("sample 17"), "KeyError: 'sample 17'"),
    (None, OSError("disk"), "OSError: disk"),
    (torch.ones(8, 4), None, "the data source gave a Tensor; it must give"),
    ((torch.ones(8, 4),), None, "the data source gave a tuple of 1"),
    ({"x": torch.ones(8, 4)}, None, "the data source gave a dict"),
    ((torch.ones(8, 4), torch.ones(7, 4)), None, "8 rows, targets has 7"),
    ((torch.ones(8, 4), None), None, "targets are missing"),
    ((None, torch.ones(8, 4)), None, "inputs are missing"),
    ((torch.ones(8, 4), torch.ones(8, 4), {"shift": object()}), None, "shift is a builtins.object"),
]


def break_source(rank: int, group: Any, data_rank: int | None) -> list[str]:
    """What broken sources of one rank lead to on each, and whether the engine goes on."""
    wrong: list[str] = []
    schedule = build("one_f_one_b", num_ranks=2, num_microbatches=4)
    engine = toy_engine(rank, group, schedule, data_rank=data_rank)
    for item, error, expected in BROKEN:
        for broken_rank in (0, 1) if data_rank is None else (data_rank,):
            # without a data rank, the first rank needs no targets, and the last one no inputs
            unneeded = ("targets are missing", "inputs are missing")[broken_rank]
            if data_rank is None and expected == unneeded:
                continue
            source: Any = Broken(item, error) if rank == broken_rank else partial(toy_batch, 8)
            told = []
            for _ in range(3):
                try:
                    told.append(engine.step(source).loss.item())
                except Exception as raised:
                    told.append(f"{type(raised).__name__}: {raised}")
            if not (close(told[0], KNOWN[4][0]) and close(told[2], KNOWN[4][0])):
                wrong.append(f"{expected}, broken on {broken_rank}: {told}")
            if expected not in str(told[1]):
                wrong.append(f"{expected}, broken on {broken_rank}: told {told[1]}")
            if rank != broken_rank and f"InputError: rank {broken_rank} refused" not in str(
                told[1]
            ):
                wrong.append(f"{expected}: the other rank was told {told[1]}")
    try:
        engine.step(iter([toy_batch(8)]), toy_batch(8)[1])
        wrong.append("targets besides a source were taken")
    except InputError as error:
        if "leave targets out" not in str(error):
            wrong.append(str(error))
    engine.close()
    return wrong


@pytest.mark.parametrize("data_rank", [None, 0, 1])
def test_errors_of_a_data_source_reach_every_rank_and_the_engine_goes_on(data_rank: Any) -> None:
    """Its own error on its rank, a quote of it on the other, and the next step is right."""
    assert flat(run_ranks(break_source, 2, data_rank, transport="sockets")) == []


def send_oddly(rank: int, group: Any) -> list[str]:
    """Batches that cannot be sent, from the rank that feeds all."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=4)
    engine = toy_engine(rank, group, schedule, data_rank=0)
    told: list[str] = []
    x, t = toy_batch(8)
    for extra in (stretto.whole(object()), stretto.whole(x.to_sparse())):
        try:
            engine.step(x, t, extra=extra)
            told.append("nothing was raised")
        except InputError as error:
            told.append(str(error))
    told.append(f"{engine.step(x, t).loss.item():.6f}")
    engine.close()
    try:
        toy_engine(rank, group, schedule, data_rank=2)
    except InputError as error:
        told.append(str(error))
    try:
        toy_engine(rank, group, schedule, data_rank=rank)
    except InputError as error:
        told.append(str(error))
    return told


def test_batches_that_cannot_be_sent_are_refused_on_every_rank() -> None:
    """What other ranks cannot be given is named before anything travels; as are odd ranks."""
    for told in run_ranks(send_oddly, 2, transport="sockets"):
        assert "a builtins.object" in told[0]
        assert "torch.sparse_coo" in told[1]
        assert told[2] == "0.552037"
        assert "data_rank is 2; ranks are 0..1" in told[3]
        assert "do not agree on loss_index, seed, data_rank" in told[4]
