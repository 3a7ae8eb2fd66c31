"""Nothing lives longer than it is needed: graphs, buffers, batches, over a step and over many.

What goes wrong elsewhere: a closure makes a circle of references, so activations wait for the
garbage collector and the peak grows by whole steps; sent outputs, received buffers and returned
outputs are kept until the step ends, so a schedule made for little memory uses as much as the
simplest one; and a step that failed holds on to all it had.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from every_schedule import every_schedule, flat, toy_depth, toy_engine
from reference import toy_batch, toy_layer
from stretto.errors import EndOfData
from stretto.ir import Schedule
from stretto.models import split
from stretto.runtime import Engine, HookEvent
from stretto.schedules import build
from stretto.testing import run_ranks
from stretto.verify import peak_memory

MSE = nn.functional.mse_loss


class Saved:
    """A tensor that autograd saved; lives as long as the graph that holds it."""

    def __init__(self, tensor: torch.Tensor, place: Any) -> None:
        self.tensor, self.place = tensor, place


class Watch:
    """Keeps weak references to all that autograd saves inside the block."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.count = 0
        self.place: Any = None
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor.detach(), self.place)  # an output would hold its own graph
        self.alive.add(saved)
        self.count += 1
        return saved

    def __enter__(self) -> Watch:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def places(self) -> set[Any]:
        """The stages and microbatches whose saved tensors live."""
        return {saved.place for saved in self.alive}


def count_tensors(most: int = 0) -> int:
    """How many tensors there are that Python knows, once they are no more than `most`, or 1 s on.

    The threads of a transport let go of a message just after they have handed it over.
    """
    deadline = time.monotonic() + (1.0 if most else 0.1)
    while True:
        # the type is asked, as some of torch's objects warn when they are asked for their class
        count = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        if count <= most or time.monotonic() > deadline:
            return count
        time.sleep(0.001)


def watch_steps(rank: int, group: Any) -> list[str]:
    """What is alive after each of three steps, with the collector off."""
    wrong: list[str] = []
    gc.freeze()  # what was there before is not looked through again and again
    gc.disable()
    for name, schedule in every_schedule(2, 4):
        engine = toy_engine(rank, group, schedule)
        counts: list[int] = []
        for step in range(3):
            with Watch() as watch:
                result = engine.step(*toy_batch(8), return_outputs=True)
                if watch.count < 4 * len(engine.stages):
                    wrong.append(f"{name}: only {watch.count} saved tensors were seen")
                if len(watch.alive):
                    wrong.append(f"{name}, step {step}: {len(watch.alive)} of them live on")
            kept = [result.loss, result.microbatch_losses, result.outputs]
            if any(one is not None and (one.requires_grad or one.grad_fn) for one in kept):
                wrong.append(f"{name}: what is returned carries a graph")
            with Watch() as watch:
                engine.eval_step(*toy_batch(8))
                if watch.count:
                    wrong.append(f"{name}: an evaluation saved {watch.count} tensors")
            del result, kept, watch
            counts.append(count_tensors(most=counts[0] if counts else 0))
        if counts[2] > counts[0]:
            wrong.append(f"{name}: tensors after each step: {counts}")
        engine.close()
    gc.enable()
    return wrong


def test_no_graph_outlives_its_step_with_the_collector_off() -> None:
    """No saved tensor is alive after a step, and there are as many tensors after each."""
    assert flat(run_ranks(watch_steps, 2, transport="gloo")) == []


class Breaks(nn.Module):
    """A toy layer that raises in the forward or the backward of one microbatch."""

    def __init__(self, index: int, where: str) -> None:
        super().__init__()
        self.layer = toy_layer(index)
        self.where = where
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layer(h)
        self.calls += 1
        if self.calls == 3 and self.where == "forward":
            raise ValueError("broken on purpose")
        if self.calls == 3 and self.where == "backward":
            h.register_hook(self._raise)
        return h

    def _raise(self, gradient: torch.Tensor) -> None:
        raise ValueError("broken on purpose")


def watch_failures(
    rank: int, group: Any, schedule: Schedule, where: str, both_done: threading.Barrier
) -> list[str]:
    """What is alive on a rank after a step that raised somewhere, with the collector off."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "loss" and target[0, 0] == toy_batch(8)[1][4, 0]:
            raise ValueError("broken on purpose")
        return MSE(output, target)

    def hook(event: HookEvent) -> None:
        if where == "hook" and event.microbatch == 2 and event.stage == 1:
            raise ValueError("broken on purpose")

    depth = toy_depth(schedule)
    layers: list[nn.Module] = [toy_layer(index) for index in range(depth)]
    if where in ("forward", "backward"):
        layers[depth // 2] = Breaks(depth // 2, where)
    engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=loss_fn, group=group)
    engine.register_hook("after_forward", hook)
    gone: list[str] = []
    told: list[str] = []
    with Watch() as watch:
        try:
            engine.step(lambda: (watched(toy_batch(8)[0], gone), toy_batch(8)[1]))
        except Exception as error:
            told.append(str(error))
    both_done.wait()
    wrong = [] if told and "broken on purpose" in told[0] else [f"told {told}"]
    if len(watch.alive):
        wrong.append(f"{len(watch.alive)} of {watch.count} saved tensors live on")
    if gone != ["gone"]:
        wrong.append("the batch lives on")
    return wrong


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "hook"])
def test_a_failed_step_lets_go_of_all_it_had_with_the_collector_off(where: str) -> None:
    """Graphs and batch are gone on every rank as soon as the error is, in every schedule."""
    gc.disable()
    try:
        for name, schedule in every_schedule(2, 4):
            barrier = threading.Barrier(2, timeout=20)
            wrong = run_ranks(watch_failures, 2, schedule, where, barrier, timeout_s=20)
            assert wrong == [[], []], name
    finally:
        gc.enable()


class Watched(np.ndarray):
    """Memory whose end can be seen."""


def watched(value: torch.Tensor, gone: list[str]) -> torch.Tensor:
    """The same numbers in memory that reports when nothing uses it any more."""
    memory = value.numpy().copy().view(Watched)
    weakref.finalize(memory, gone.append, "gone")
    return torch.from_numpy(memory)


def refuse_steps(rank: int, group: Any) -> list[str]:
    """Whether refused batches, and the last one before the data ended, are let go."""
    wrong: list[str] = []
    gc.freeze()  # what was there before is not looked through again and again
    gc.disable()
    for name, schedule in every_schedule(2, 4):
        engine = toy_engine(rank, group, schedule)
        x, t = toy_batch(8)
        gone: list[str] = []
        bad = [(x[:3], t), (x, t[:7]), (x, None)]
        for inputs, targets in bad:
            try:
                engine.step(lambda x=inputs, t=targets, gone=gone: (watched(x, gone), t))
                wrong.append(f"{name}: nothing was raised")
            except ValueError:
                pass
        sources = ((watched(x, gone), t) for _ in range(1 - rank))
        try:
            engine.step(sources)
            wrong.append(f"{name}: the end was not seen")
        except EndOfData:
            pass
        if len(gone) != (4 if rank == 0 else 3):
            wrong.append(f"{name}: {len(gone)} of the refused batches were let go")
        engine.close()
    gc.enable()
    return wrong


def test_refused_batches_are_let_go_with_the_collector_off() -> None:
    """A batch that cannot be used, or meets the end of another's data, leaves nothing behind."""
    assert flat(run_ranks(refuse_steps, 2, transport="gloo")) == []


def watch_places(rank: int, group: Any, m: int) -> dict[str, int]:
    """Schedule → the most microbatches of stages whose saved tensors lived at once."""
    peaks: dict[str, int] = {}
    for name, schedule in every_schedule(4, m):
        layers = [toy_layer(index) for index in range(toy_depth(schedule))]
        engine = Engine(split(layers, schedule, rank=rank), schedule, loss_fn=MSE, group=group)
        with Watch() as watch:

            def enter(event: HookEvent, watch: Watch = watch) -> None:
                watch.place = (event.stage, event.microbatch)

            def leave(event: HookEvent, watch: Watch = watch, name: str = name) -> None:
                peaks[name] = max(peaks.get(name, 0), len(watch.places))

            engine.register_hook("before_forward", enter)
            engine.register_hook("after_forward", leave)
            engine.step(*toy_batch(m))
        engine.close()
    return peaks


def test_saved_tensors_live_for_as_many_microbatches_as_proved() -> None:
    """On rank r at most min(m, 4 - r) in 1F1B, all m in GPipe; in every schedule what is proved."""
    for m in (16, 3):
        peaks = run_ranks(watch_places, 4, m, transport="gloo")
        for name, schedule in every_schedule(4, m):
            assert tuple(one[name] for one in peaks) == peak_memory(schedule), name
        assert [one["one_f_one_b"] for one in peaks] == [min(m, 4 - rank) for rank in range(4)]
        assert [one["gpipe"] for one in peaks] == [m] * 4


class Wide(nn.Module):
    """Saves one tensor as large as its output, and has nothing else of size."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (h + self.shift).tanh()


M_MMAP_THRESHOLD = -3  # of the C library's mallopt
PAYLOAD = 1 << 19  # numbers of one microbatch, 2 MiB


def measure_growth(rank: int, group: Any) -> dict[tuple[str, int], float]:
    """How many payloads the process grew by, at the peak of a step, by schedule and m."""
    grown: dict[tuple[str, int], float] = {}
    # large blocks go back to the system as soon as they are freed
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    for name, m in (("one_f_one_b", 4), ("one_f_one_b", 12), ("gpipe", 12)):
        schedule = build(name, num_ranks=4, num_microbatches=m)
        stages = {stage: Wide() for stage in schedule.placement.stages_of(rank)}
        engine = Engine(stages, schedule, loss_fn=MSE, group=group, seed=None)
        rows = torch.zeros(m, PAYLOAD)
        before = _memory_bytes("VmRSS")
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        engine.step(rows, rows)
        grown[name, m] = (_memory_bytes("VmHWM") - before) / (4 * PAYLOAD)
        engine.close()
        del engine, rows
    return grown


def _memory_bytes(what: str) -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(what))


def test_peak_memory_of_1f1b_does_not_grow_with_microbatches() -> None:
    """Sent outputs, received buffers and gradients go at once: three times the m, the same peak."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell the peak of a process's memory")
    answers = run_ranks(measure_growth, 4, transport="gloo")
    for rank, grown in enumerate(answers):
        # one saved tensor for each of min(m, 4 - r) microbatches, and a few that are under way
        assert grown["one_f_one_b", 12] <= (4 - rank) + 5, (rank, grown)
        assert grown["one_f_one_b", 12] <= grown["one_f_one_b", 4] + 2, (rank, grown)
        assert grown["gpipe", 12] >= 12, (rank, grown)


def run_long(rank: int, group: Any) -> list[tuple[int, ...]]:
    """Live tensors, threads, files, objects and memory along 200 steps, with the collector off."""
    gc.freeze()
    gc.disable()
    engine = toy_engine(rank, group, build("one_f_one_b", num_ranks=2, num_microbatches=4))
    looks: list[tuple[int, ...]] = []
    for step in range(1, 201):
        engine.step(*toy_batch(4096 + 1024 * (step % 2)))  # 32 KiB in a microbatch, or 40
        for stage in engine.stages.values():
            stage.zero_grad()
        if step % 10 == 0:
            engine.eval_step(*toy_batch(5), return_outputs=True)
        if step in (60, 200):
            look = (
                count_tensors(most=looks[0][0] if looks else 0),
                threading.active_count(),
                len(os.listdir("/proc/self/fd")),
                len(gc.get_objects()),
                _memory_bytes("VmRSS"),
            )
            looks.append(look)
    engine.close()
    return looks


def test_two_hundred_steps_leave_nothing_behind() -> None:
    """Live tensors, threads, files, objects and memory are those of step 60."""
    for first, last in run_ranks(run_long, 2, transport="gloo"):
        room = (0, 0, 0, 50, 3 << 20)  # one tensor per step would be 4.4 MiB
        grown = [now - then for then, now in zip(first, last, strict=True)]
        assert all(one <= more for one, more in zip(grown, room, strict=True)), (first, last)


def test_a_leak_would_be_seen() -> None:
    """The counts of this module see one tensor, and one graph, that somebody keeps."""
    before = count_tensors()
    kept = [torch.ones(3)]
    assert count_tensors() == before + 1
    with Watch() as watch:
        kept.append((torch.ones(3, requires_grad=True) * 2).tanh())
        assert len(watch.alive) == 1
        kept.clear()
        assert len(watch.alive) == 0
