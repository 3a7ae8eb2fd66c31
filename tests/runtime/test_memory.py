"""What a rank holds in a real run is what the proof said, however many microbatches there are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from stretto.ir import Schedule
from stretto.runtime import Engine
from stretto.runtime.stage import StageRunner
from stretto.runtime.wire.message import Message
from stretto.schedules import build
from stretto.testing import run_ranks
from stretto.verify import peak_memory


class Token:
    """Lives exactly as long as the graph that holds it."""


class Counter:
    """How many objects are alive, and the most there ever were."""

    def __init__(self) -> None:
        self.alive = 0
        self.peak = 0

    def add(self, thing: Any) -> None:
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        weakref.finalize(thing, self.drop)

    def drop(self) -> None:
        self.alive -= 1


class Probe(torch.autograd.Function):
    """The identity; its graph node holds a token."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, counter: Counter) -> torch.Tensor:
        ctx.token = Token()
        counter.add(ctx.token)
        return h * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad.sum(), None


class CountedStage(nn.Module):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.counter = counter

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return Probe.apply(h, self.weight, self.counter).tanh()


def count_live(rank: int, group: Any, schedule: Schedule) -> tuple[int, int, int, int]:
    """Peak of live graphs and of boundary tensors, and what is left of both after the step."""
    activations, boundary = Counter(), Counter()
    leave, backward = StageRunner.leave, StageRunner.backward

    def spy(answer: tuple[Message, dict[int, Message]]) -> tuple[Message, dict[int, Message]]:
        for message in (answer[0], *answer[1].values()):
            for tensor in message.tensors:
                boundary.add(tensor)
        return answer

    stages = {stage: CountedStage(activations) for stage in schedule.placement.stages_of(rank)}
    engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
    StageRunner.leave = lambda *a, **k: spy(leave(*a, **k))  # type: ignore[method-assign]  # reason: a spy in a forked process
    StageRunner.backward = lambda *a, **k: spy(backward(*a, **k))  # type: ignore[method-assign]  # reason: as above
    gc.disable()
    batch = torch.ones(2 * schedule.num_microbatches, 3)
    for _ in range(2):
        engine.step(batch, batch)
    gc.enable()
    engine.close()
    return activations.peak, boundary.peak, activations.alive, boundary.alive


CASES = [("gpipe", 1), ("one_f_one_b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2)]


@pytest.mark.parametrize(("name", "v"), CASES)
def test_live_activations_equal_the_proved_number(name: str, v: int) -> None:
    """Graphs alive at the peak are, rank by rank, what verify computed, for m = 8 and m = 64."""
    options = {} if v == 1 else {"stages_per_rank": v}
    boundary: dict[int, list[int]] = {}
    for m in (8, 64):
        schedule = build(name, num_ranks=4, num_microbatches=m, **options)
        answers = run_ranks(count_live, 4, schedule, transport="sockets")
        assert tuple(peak for peak, _, _, _ in answers) == peak_memory(schedule)
        assert [left for _, _, left, _ in answers] == [0, 0, 0, 0]
        assert [left for _, _, _, left in answers] == [0, 0, 0, 0]
        boundary[m] = [peak for _, peak, _, _ in answers]
    # a sent tensor is let go at once: only the one at hand is alive, at m = 64 as at m = 8
    assert boundary[8] == boundary[64]
    assert max(boundary[64]) <= 2
