"""Models of any number of stages with a value of some kind between them, and their plain runs.

A case is three functions: what the first stage makes, what every stage between does with it, and
what the last makes of it. Each stage notes what it was given, down to strides and bytes, so that
every comparison with the plain run also says whether values arrived as they were sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from every_schedule import flat
from reference import gradients_of, same_bits
from stretto.ir import Action, Kind, Schedule
from stretto.ir.calling import spread
from stretto.ir.placement import v
from stretto.runtime import Engine, StepResult
from stretto.runtime.hooks import HookEvent
from stretto.runtime.tree import flatten
from stretto.schedules import build
from stretto.testing import run_ranks

WIDTH = 5
MICROBATCHES = 4
WORLDS = [(1, "threads"), (2, "gloo"), (3, "sockets")]
"""Ranks and transport; alone, a rank has three stages and all edges inside."""

Work = Callable[..., Any]


class Part(nn.Module):
    """A stage: a function of itself and of what it is given, which may use its linear layer."""

    work: Work
    linear: nn.Linear

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def become(self, work: Work, dtype: torch.dtype) -> Part:
        """Start anew with other work, weights drawn from the index, and nothing seen."""
        for handle in self.__dict__.pop("handles", ()):
            handle.remove()
        self.handles: list[RemovableHandle] = []
        """Hooks of this module, which go when its work ends."""
        self.work = work
        self.calls = 0
        """How often it has run before; in the first step, the microbatch."""
        self.seen: list[Any] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.came: list[Any] = []
        self.held: dict[str, Any] = {}
        """For what the work itself leaves for its next call."""
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        generator = torch.Generator().manual_seed(self.index)  # threads share the global one
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn - 0.5)
        return self

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.seen.append(described((args, keywords)))
        output = self.work(self, *args, **keywords)
        self.calls += 1
        return output

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hold on to a tensor, as a user may; its values must stay."""
        self.kept.append((tensor, tensor.detach().clone()))
        return tensor

    def noted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note the gradient that will come for a tensor, down to strides and bytes."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.came.append(described(gradient)))
        return tensor


@dataclass(frozen=True)
class Case:
    """A kind of value: what makes it, what passes it on, and what uses it up.

    Args:
        first: The first stage's work: `first(part, x)`.
        middle: The work of stages between; called with the value as stages are.
        last: The last stage's work.
        loss: The loss function.
        batches: Step → inputs and targets, whole or as lists of microbatches.
        dtype: Dtype of the linear layers and of the batch.
        prepare: What is done to each stage before it runs.
        steps: How many training steps are compared.
        evaluates: Whether it also runs without gradients.
    """

    first: Work
    middle: Work
    last: Work
    loss: Callable[..., torch.Tensor] = nn.functional.mse_loss
    batches: Callable[[int], tuple[Any, Any]] | None = None
    dtype: torch.dtype = torch.float32
    prepare: Callable[[Part], None] | None = None
    steps: int = 1
    evaluates: bool = True

    def given_to(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Give the stages of a model, at least two, their work."""
        works = [self.first, *[self.middle] * (len(parts) - 2), self.last]
        for part, work in zip(parts, works, strict=True):
            part.become(work, self.dtype)
            if self.prepare is not None:
                self.prepare(part)
        return parts

    def batch(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets of a step: at first one row more than microbatches of two make."""
        if self.batches is not None:
            return self.batches(step)
        return drawn_batch(step, 2 * MICROBATCHES + (step == 0), dtype=self.dtype)


def drawn_batch(
    seed: int, rows: int, *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of shape (rows, *shape, WIDTH) drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, *shape, WIDTH)
    inputs, targets = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in "xt")
    return inputs.to(dtype), targets.to(dtype)


def described(value: Any) -> Any:
    """A value as plain data: of tensors all that a stage can see of them."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, data
    if isinstance(value, Mapping):
        parts: Any = [(described(key), described(one)) for key, one in value.items()]
    elif isinstance(value, tuple | list):
        parts = [described(one) for one in value]
    elif dataclasses.is_dataclass(value):
        names = dict.fromkeys([f.name for f in dataclasses.fields(value)])
        names |= dict.fromkeys(getattr(value, "__dict__", ()))
        parts = [(name, described(getattr(value, name))) for name in names]
    else:
        parts = value.hex() if isinstance(value, float) else value
    return type(value).__name__, parts


def folded(num_ranks: int, num_microbatches: int) -> Schedule:
    """A V whose ranks run all microbatches of a stage before the next one: the fold is local.

    rank 0: 0F0 0F1 .  .  .  .  3F0 3F1 3B0 3B1 .  .  .  .  0B0 0B1
    rank 1: .  .  1F0 1F1 2F0 2F1 .  .  .  .  2B0 2B1 1B0 1B1
    """
    placement = v(num_ranks=num_ranks)
    orders = []
    for rank in range(num_ranks):
        low, high = placement.stages_of(rank)
        order = [(low, Kind.F), (high, Kind.F), (high, Kind.B), (low, Kind.B)]
        orders.append(
            tuple(Action(stage, kind, m) for stage, kind in order for m in range(num_microbatches))
        )
    return Schedule(placement=placement, num_microbatches=num_microbatches, ranks=tuple(orders))


def schedules(num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Every family, and on one or two ranks a V; alone, those with several stages per rank."""
    if num_ranks > 1:
        for name in ("gpipe", "one_f_one_b"):
            yield name, build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    for name in ("interleaved_1f1b", "looped_bfs"):
        yield (
            name,
            build(
                name,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                stages_per_rank=2 if num_ranks > 1 else 3,
            ),
        )
    if num_ranks < 3:
        yield "folded", folded(num_ranks, num_microbatches)


def pieces(batch: Any, count: int) -> Sequence[torch.Tensor]:
    """The microbatches of a batch."""
    return batch if isinstance(batch, list) else torch.tensor_split(batch, count)


def only(loss: Any) -> torch.Tensor:
    """A loss as a number, which may be in a tuple or have dimensions."""
    return (loss[0] if isinstance(loss, tuple) else loss).reshape(())


def plain_step(case: Case, parts: Sequence[Part], step: int, num_microbatches: int) -> torch.Tensor:
    """One step of plain accumulation over the stages as one model; the loss."""
    inputs, targets = (pieces(one, num_microbatches) for one in case.batch(step))
    rows = sum(len(piece) for piece in inputs)
    total: torch.Tensor | None = None
    for x, target in zip(inputs, targets, strict=True):
        value: Any = x
        for part in parts:
            args, keywords = spread(value)
            value = part(*args, **keywords)
        scaled = only(case.loss(value, target)) / (rows / len(x))
        if torch.is_grad_enabled():
            scaled.backward()
        total = scaled.detach() if total is None else total + scaled.detach()
    assert total is not None
    return total.double()


@dataclass(frozen=True)
class Noted:
    """What a stage has noted so far, and its gradients."""

    calls: int
    seen: list[Any]
    came: list[Any]
    gradients: dict[str, torch.Tensor]


def notes_of(part: Part) -> Noted:
    """A copy of what a stage has noted."""
    return Noted(part.calls, [*part.seen], [*part.came], gradients_of(part))


@dataclass(frozen=True)
class Expected:
    """The loss of a plain step, and what the stages had noted after it."""

    when: str
    loss: torch.Tensor
    stages: list[Noted]


def plain_run(case: Case, num_stages: int, num_microbatches: int) -> list[Expected]:
    """All plain steps of a case, and an evaluation."""
    parts = case.given_to([Part(index) for index in range(num_stages)])
    run: list[Expected] = []
    for step in range(case.steps + case.evaluates):
        is_training = step < case.steps
        with torch.set_grad_enabled(is_training):
            loss = plain_step(case, parts, step, num_microbatches)
        when = f"step {step}" if is_training else "evaluation"
        run.append(Expected(when, loss, [notes_of(part) for part in parts]))
    return run


class Pipeline:
    """One engine on stages whose work changes from case to case, made anew after an error."""

    def __init__(self, rank: int, group: Any, schedule: Schedule, **options: Any) -> None:
        self.parts = [Part(index) for index in range(schedule.num_stages)]
        self.mine = {index: self.parts[index] for index in schedule.placement.stages_of(rank)}
        self._group, self._schedule, self._options = group, schedule, options
        self._case: Case | None = None
        self._outputs: dict[tuple[int, int], Any] = {}
        self._unfit: list[str] = []
        self.engine = self._made()

    def _made(self) -> Engine:
        engine = Engine(
            self.mine,
            self._schedule,
            loss_fn=self._loss,
            group=self._group,
            step_timeout_s=20,
            **self._options,
        )
        engine.register_hook("after_forward", self._note_outputs)
        engine.register_hook("before_backward", self._check_gradients)
        return engine

    def _note_outputs(self, event: HookEvent) -> None:
        made = {id(leaf): leaf for leaf in flatten(event.value)[0]}.values()
        needed = [(one.dtype, one.shape) if one.requires_grad else None for one in made]
        self._outputs[event.stage, event.microbatch] = needed

    def _check_gradients(self, event: HookEvent) -> None:
        """Gradients come back in the dtype and shape of the forward's tensors, in their places."""
        outputs = self._outputs.pop((event.stage, event.microbatch))
        if event.value is None:
            return
        told = [None if one is None else (one.dtype, one.shape) for one in event.value]
        if any(one not in (None, output) for one, output in zip(told, outputs, strict=True)):
            self._unfit.append(f"{event.stage}B{event.microbatch}: {told} came for {outputs}")

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._case is not None
        return self._case.loss(output, target)

    def begin(self, case: Case) -> None:
        """Turn to another case."""
        self._case = case
        case.given_to(self.parts)

    def step(self, step: int, **options: Any) -> StepResult:
        """One step of the case."""
        assert self._case is not None
        return self.engine.step(*self._case.batch(step), **options)

    def differences(self, case: Case, run: Sequence[Expected]) -> Iterator[str]:
        """All steps against the plain run: losses, gradients, and what stages were given."""
        self.begin(case)
        try:
            for step, expected in enumerate(run):
                loss = (self.step(step) if step < case.steps else self._evaluate(step)).loss
                if loss is None or not same_bits(loss, expected.loss):
                    yield f"{expected.when}: loss {loss} is not {expected.loss}"
                for index, part in self.mine.items():
                    for one in unlike(part, expected.stages[index]):
                        yield f"{expected.when}, stage {index}: {one}"
        except Exception as error:  # the other cases go on
            yield f"{type(error).__name__}: {error}"
            self.engine.close()
            self.engine = self._made()
        yield from self._unfit
        self._unfit.clear()

    def _evaluate(self, step: int) -> StepResult:
        assert self._case is not None
        batch = self._case.batch(step)
        return self.engine.eval_step(*batch, num_microbatches=self._schedule.num_microbatches)


def unlike(part: Part, plain: Noted) -> Iterator[str]:
    """What differs between a stage of a pipeline and that of the plain run."""
    found = notes_of(part)
    if found.calls != plain.calls:
        yield f"{found.calls} calls, not {plain.calls}"
    for call, (seen, expected) in enumerate(zip(found.seen, plain.seen, strict=False)):
        if seen != expected:
            yield f"call {call} was given {seen}, not {expected}"
    if found.came != plain.came:
        yield f"the gradients {found.came} came, not {plain.came}"
    for before, (tensor, copy) in enumerate(part.kept):
        if not same_bits(tensor, copy):
            yield f"kept tensor {before} has changed"
    for name in dict(part.named_parameters()):
        one, other = found.gradients.get(name), plain.gradients.get(name)
        if (one is None) != (other is None):
            yield f"{name} has a gradient: {one is not None}, not {other is not None}"
        elif one is not None and other is not None and not same_bits(one, other):
            yield f"the gradient of {name}"


def compare_cases(
    rank: int, group: Any, num_ranks: int, cases: Mapping[str, Case], num_microbatches: int
) -> list[str]:
    """Every case on every schedule, in one world; evaluations on one or two ranks only."""
    wrong: list[str] = []
    runs: dict[tuple[str, int], list[Expected]] = {}
    for label, schedule in schedules(num_ranks, num_microbatches):
        pipeline = Pipeline(rank, group, schedule)
        for name, case in cases.items():
            if num_ranks > 2:
                case = replace(case, evaluates=False)
            key = (name, schedule.num_stages)
            if key not in runs:
                runs[key] = plain_run(case, schedule.num_stages, num_microbatches)
            found = pipeline.differences(case, runs[key])
            wrong += [f"{name} on {label}: {one}" for one in found]
        pipeline.engine.close()
    return wrong


def all_differences(
    num_ranks: int, transport: str, cases: Mapping[str, Case], num_microbatches: int = MICROBATCHES
) -> list[str]:
    """What differs from the plain runs, on any rank."""
    answers = run_ranks(
        compare_cases,
        num_ranks,
        num_ranks,
        cases,
        num_microbatches,
        transport=transport,
        timeout_s=100,
    )
    return flat(answers)
