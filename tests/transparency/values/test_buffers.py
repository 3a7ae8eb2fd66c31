"""Tensors that are written again after they were returned, and what is kept of them.

What goes wrong elsewhere: the transport still reads an output, or a gradient, that its stage has
freed or already fills with the next microbatch; whether it shows depends on sizes and timing. Or
the receiver's memory is used for the next message while the user, or a graph, still holds the last.

Here a value is sent as it was when it was returned. Where it does not travel, since the next stage
is on the same rank, there is no copy; then what was written over is an error that says so.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from every_schedule import flat
from reference import same_bits
from stretto.errors import ExecutionError
from stretto.ir import Schedule
from stretto.testing import run_ranks
from value_models import (
    WORLDS,
    Case,
    Part,
    Pipeline,
    Work,
    all_differences,
    drawn_batch,
    notes_of,
    plain_step,
    schedules,
    unlike,
)

LARGE = 300_000
"""Elements of a tensor that no socket takes at once."""

CHANGED = "changed in place after it was returned and before it was used; return a fresh tensor"


def inner_ranks(schedule: Schedule) -> set[int]:
    """The ranks that own two neighbouring stages."""
    owners = schedule.placement.replicas[0]
    return {one for one, other in pairwise(owners) if one == other}


def slow_first(part: Part, is_first: bool) -> None:
    """The first microbatch is worked on for so long that senders are ahead."""
    if is_first:
        time.sleep(0.2)


def filled(part: Part, x: torch.Tensor) -> Any:
    """One buffer for all microbatches, filled with the number of each."""
    buffer = part.held.setdefault("buffer", torch.empty(LARGE))
    return buffer.fill_(part.calls), part.linear(x)


def copied_on(part: Part, value: torch.Tensor, h: torch.Tensor) -> Any:
    """What came is copied into a buffer of one's own, which is sent on."""
    buffer = part.held.setdefault("buffer", torch.empty(LARGE))
    return buffer.copy_(value), part.linear(h)


def noted(part: Part, value: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The last stage notes all numbers that are in the buffer."""
    slow_first(part, part.calls == 0)
    part.held.setdefault("got", []).append(value.unique().tolist())
    return part.linear(h)


class Refilled(torch.autograd.Function):
    """The identity, whose gradients are one buffer, filled with the number of the microbatch."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part, ctx.microbatch = part, part.calls
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        buffer = ctx.part.held.setdefault("gradient", torch.empty(LARGE))
        ctx.part.held.setdefault("sent", []).append(ctx.microbatch)
        return buffer.fill_(ctx.microbatch), None


def noting(part: Part, value: torch.Tensor) -> torch.Tensor:
    """Note all numbers that are in the gradient of a value, the first time slowly."""

    def note(gradient: torch.Tensor) -> None:
        slow_first(part, "got" not in part.held and part.index == 0)
        part.held.setdefault("got", []).append(gradient.unique().tolist())

    value.register_hook(note)
    return value


def spread_out(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A large activation, whose gradient is noted."""
    return noting(part, part.linear(x).mean() * torch.ones(LARGE))


def refilled(part: Part, value: torch.Tensor) -> torch.Tensor:
    """Gradients that go back from here are one buffer; what comes is noted."""
    return noting(part, Refilled.apply(value, part) * 1)


def averaged(part: Part, value: torch.Tensor) -> torch.Tensor:
    """The last stage of those."""
    return (Refilled.apply(value, part).mean() + part.linear.bias).expand(2, -1)


NOTING = (noted, spread_out, refilled)


def told_of(pipeline: Pipeline, case: Case) -> str:
    """What a step of a case raises, or nothing."""
    pipeline.begin(case)
    try:
        pipeline.step(0)
    except ExecutionError as error:
        return str(error)
    finally:
        pipeline.engine.close()
    return ""


def written_over(rank: int, group: Any, num_ranks: int, case: Case) -> list[str]:
    """Runs with buffers that are written again: right, or refused where nothing travels."""
    wrong: list[str] = []
    for label, schedule in schedules(num_ranks, 4):
        pipeline = Pipeline(rank, group, schedule)
        told = told_of(pipeline, replace(case, batches=lambda step: drawn_batch(step, 8)))
        got = [part.held.get("got") for part in pipeline.mine.values() if part.work in NOTING]
        inner = inner_ranks(schedule)
        if label == "folded" and not told:
            wrong.append(f"{label}: nothing was raised")
        elif told and (not inner or (rank in inner and CHANGED not in told)):
            wrong.append(f"{label}: {told}")
        elif not told and any(one != [[0.0], [1.0], [2.0], [3.0]] for one in got):
            wrong.append(f"{label}: {got}")
    return wrong


def written_again(num_ranks: int, transport: str, case: Case, rule: str = "buffered") -> list[str]:
    """What is wrong on any rank."""
    return flat(run_ranks(written_over, num_ranks, num_ranks, case, transport=transport, rule=rule))


RULES = [("threads", "rendezvous"), ("threads", "blocking"), ("threads", "nccl")]
RULES += [("gloo", "buffered")]


@pytest.mark.parametrize(("transport", "rule"), RULES)
def test_a_buffer_written_again_is_sent_as_it_was(transport: str, rule: str) -> None:
    """The last stage gets 0, 1, 2, 3, though the first fills the same buffer meanwhile."""
    assert written_again(2, transport, Case(filled, copied_on, noted), rule) == []


@pytest.mark.parametrize(("transport", "rule"), RULES)
def test_a_gradient_written_again_is_sent_as_it_was(transport: str, rule: str) -> None:
    """Every stage gets 0, 1, 2, 3, though gradients are made in one buffer of the stage behind."""
    assert written_again(2, transport, Case(spread_out, refilled, averaged), rule) == []


@pytest.mark.parametrize(
    "case",
    [Case(filled, copied_on, noted), Case(spread_out, refilled, averaged)],
    ids=["values", "gradients"],
)
def test_buffers_written_again_are_never_used_silently(case: Case) -> None:
    """Between ranks they are sent as they were; inside one the engine refuses what is lost."""
    assert written_again(3, "gloo", case) == []
    assert written_again(1, "threads", case) == []


def emptied_later(part: Part, *values: torch.Tensor) -> torch.Tensor:
    """The output of the microbatch before is set to zero, as by a pool that takes it back."""
    if "last" in part.held:
        part.held["last"].zero_()
    h = part.linear(values[0])
    part.held["last"] = h.detach()
    return h


def rewritten(part: Part, x: torch.Tensor) -> torch.Tensor:
    """An activation in memory that is used for every microbatch."""
    buffer = part.held.setdefault("buffer", torch.empty(2, 5)).detach()
    part.held["buffer"] = buffer
    return buffer.copy_(part.linear(x))


def summed(part: Part, h: torch.Tensor) -> torch.Tensor:
    """A stage that saves nothing of its input."""
    return h + part.linear.bias


def result_of(rank: int, group: Any, num_ranks: int, work: Work) -> list[str]:
    """Steps whose stages write over their last output, against the same without that."""
    wrong: list[str] = []
    for label, schedule in schedules(num_ranks, 4):
        pipeline = Pipeline(rank, group, schedule)
        case = Case(work, summed, summed, batches=lambda step: drawn_batch(step, 8))
        told = told_of(pipeline, case)
        inner = inner_ranks(schedule)
        if told and (not inner or (rank in inner and CHANGED not in told)):
            wrong.append(f"{label}: {told}")
        if told:
            continue
        plain = [Part(index) for index in range(schedule.num_stages)]
        plain_case = Case(lambda part, x: part.linear(x), summed, summed, batches=case.batches)
        plain_step(plain_case, plain_case.given_to(plain), 0, 4)
        for index, part in pipeline.mine.items():
            wrong += [
                f"{label}, stage {index}: {one}" for one in unlike(part, notes_of(plain[index]))
            ]
    return wrong


@pytest.mark.parametrize("work", [emptied_later, rewritten])
@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_outputs_written_over_after_they_were_returned(
    num_ranks: int, transport: str, work: Work
) -> None:
    """Loss and gradients are those of a model that does not do so, or the engine says so."""
    answers = run_ranks(result_of, num_ranks, num_ranks, work, transport=transport)
    assert flat(answers) == []


def changed_by_hook(rank: int, group: Any) -> list[str]:
    """What a step tells when a function of the user's changes an output in place."""
    told: list[str] = []
    for label, schedule in schedules(2, 4):
        pipeline = Pipeline(rank, group, schedule)
        if rank == 0:
            pipeline.engine.register_hook(
                "after_forward", lambda event: event.value.detach().mul_(2)
            )
        case = Case(summed, summed, summed)
        told.append(f"{label}: {told_of(pipeline, case)}")
    return told


def test_an_output_changed_by_a_hook_is_refused() -> None:
    """What was meant is unknown, so the step ends with a name, in every schedule."""
    changed, _ = run_ranks(changed_by_hook, 2, transport="sockets")
    assert len(changed) == 5
    for told in changed:
        assert "the output of stage 0 was " + CHANGED in told


def same_memory(part: Part, h: torch.Tensor) -> torch.Tensor:
    """A last stage that returns all its outputs in the same memory."""
    buffer = part.held.setdefault("buffer", torch.empty(2, 5)).detach()
    part.held["buffer"] = buffer
    return buffer.copy_(h + part.linear.bias)


def scaled_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that changes the output in place first."""
    return (output.mul_(3) - target).square().mean()


def outputs_told(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Outputs of training and evaluation steps whose memory is written again."""
    wrong: list[str] = []
    for label, schedule in schedules(num_ranks, 4):
        pipeline = Pipeline(rank, group, schedule)
        fresh = [Part(index) for index in range(schedule.num_stages)]
        case = Case(
            summed, summed, same_memory, scaled_loss, batches=lambda step: drawn_batch(step, 8)
        )
        pipeline.begin(case)
        results = {
            "training": pipeline.step(0, return_outputs=True),
            "evaluation": pipeline.engine.eval_step(*case.batch(0), return_outputs=True),
            "prediction": pipeline.engine.eval_step(case.batch(0)[0]),
        }
        plain_case = Case(summed, summed, summed)
        expected: Any = case.batch(0)[0]
        for part in plain_case.given_to(fresh):
            expected = part(expected)
        for name, result in results.items():
            if result.outputs is not None and not same_bits(result.outputs, expected):
                wrong.append(f"{label}: {name} gave {result.outputs}, not {expected}")
            if rank == result.loss_rank and result.outputs is None:
                wrong.append(f"{label}: {name} gave no outputs")
        pipeline.engine.close()
    return wrong


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_returned_outputs_are_those_of_their_microbatch(num_ranks: int, transport: str) -> None:
    """Though the last stage makes all in one buffer, and the loss function writes to it."""
    assert flat(run_ranks(outputs_told, num_ranks, num_ranks, transport=transport)) == []


def hoarded(part: Part, *values: torch.Tensor) -> torch.Tensor:
    """Everything that comes, what is made of it, and its gradient are kept by the user."""
    for value in values:
        part.keep(value)
        if value.requires_grad:
            value.register_hook(part.keep)
    return part.keep(part.linear(values[0]))


HOARDED = {"everything is kept": Case(hoarded, hoarded, hoarded, steps=3)}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_what_a_user_keeps_stays_as_it_was(num_ranks: int, transport: str) -> None:
    """Inputs, outputs and gradients of stages hold their values after all later messages."""
    assert all_differences(num_ranks, transport, HOARDED) == []
