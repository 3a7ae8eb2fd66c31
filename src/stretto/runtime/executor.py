"""The one executor: a loop over a rank's lowered actions and a table kind → handler.

It knows nothing of any particular schedule. What an action needs and gives lies in one table of
values (`ir.deps`); what a RECV posted is waited for by the action that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stretto.errors import ExecutionError, StageError
from stretto.ir import (
    COMPUTE,
    Action,
    Channel,
    Kind,
    Schedule,
    Value,
    ValueKind,
    carried,
    channel_of,
    needs,
)
from stretto.runtime.hooks import HookEvent, Hooks
from stretto.runtime.random_state import LayerSeeder
from stretto.runtime.record import Recorder
from stretto.runtime.stage import LossTerm, StageRunner, Work, check_loss
from stretto.runtime.tree import flatten, unflatten
from stretto.runtime.wire.message import Message
from stretto.runtime.wire.transport import Group, Pending, Transport

RUNNABLE = frozenset(
    {
        Kind.F,
        Kind.B,
        Kind.SEND_F,
        Kind.RECV_F,
        Kind.SEND_B,
        Kind.RECV_B,
        Kind.FREE_F,
        Kind.FREE_B,
    }
)
"""The kinds the executor has a handler for."""

LossFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What a rank was given for one step, cut into microbatches.

    Args:
        number: Number of the training step; evaluations carry that of the next one.
        sizes: Rows of each microbatch, if there are rows.
        inputs: For the first stage, per microbatch; emptied as the step goes on.
        targets: For the last stage, likewise; empty if there is no loss to compute.
        extras: Keyword values per microbatch, likewise.
        divisors: What each microbatch's loss is divided by.
        row_divisors: What a mean over each microbatch's rows is divided by.
        loss_scale: What everything that enters a backward is multiplied by.
        loss_fns: Called as `fn(output, target)`; empty if the output is the loss.
        loss_index: Which of them is the loss; the others are only reported.
        has_loss: Whether the last stage computes a loss.
        keep_outputs: Whether the last stage's outputs are kept.
        keep_input_gradients: Whether the gradients of the first stage's inputs are kept.
        train: Whether gradients are computed.
    """

    number: int
    sizes: Sequence[int] | None
    inputs: list[Any]
    targets: list[Any]
    extras: list[Mapping[str, Any]]
    divisors: Sequence[float]
    row_divisors: Sequence[float]
    loss_scale: float
    loss_fns: Sequence[LossFunction]
    loss_index: int
    has_loss: bool
    keep_outputs: bool
    keep_input_gradients: bool
    train: bool


class AddedTerm(NamedTuple):
    """A reported number besides the loss, and where it was made."""

    name: str
    microbatch: int
    stage: int
    value: torch.Tensor


@dataclass(slots=True)
class StepOutput:
    """What a rank's part of a step produced.

    Args:
        losses: Microbatch → the loss.
        added: Terms added inside the model, or other losses, in the order of the calls.
        outputs: Microbatch → the last stage's output.
        input_gradients: Microbatch → gradients of the tensors of the first stage's input.
    """

    losses: dict[int, LossTerm] = field(default_factory=dict[int, LossTerm])
    added: list[AddedTerm] = field(default_factory=list["AddedTerm"])
    outputs: dict[int, Any] = field(default_factory=dict[int, Any])
    input_gradients: dict[int, Message] = field(default_factory=dict[int, Message])


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What stays the same over the steps of an engine.

    Args:
        group: The ranks; it is told where this one is, and says when another has failed.
        transport: Carries messages between ranks.
        seeder: Seeds random numbers in front of layers; None leaves them alone.
        hooks: The user's functions around the work.
        check_outgoing: Called with what is about to be sent.
        timeout_s: How long one message may be waited for.
    """

    group: Group
    transport: Transport
    seeder: LayerSeeder | None
    hooks: Hooks
    check_outgoing: Callable[[Action, Message, bool], None]
    timeout_s: float


class Executor:
    """Runs one rank's part of lowered schedules.

    Args:
        rank: This rank.
        runners: This rank's stages.
        around: What stays the same over the steps.
    """

    def __init__(self, rank: int, runners: Mapping[int, StageRunner], around: Surroundings) -> None:
        self.rank = rank
        self._runners = runners
        self._around = around
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.FREE_F: self._free,
            Kind.FREE_B: self._free,
        }
        assert set(self._handlers) == RUNNABLE

    @property
    def live(self) -> int:
        """Stage activations this rank holds."""
        return sum(runner.live for runner in self._runners.values())

    def forget(self) -> None:
        """Drop every graph, after a step that failed."""
        for runner in self._runners.values():
            runner.forget()

    def run(
        self,
        schedule: Schedule,
        given: StepInput,
        recorder: Recorder | None = None,
        in_bubble: Mapping[int, Sequence[Callable[[], None]]] | None = None,
    ) -> StepOutput:
        """Run this rank's actions of a lowered schedule, in order.

        Args:
            schedule: The lowered schedule.
            given: This rank's part of the step.
            recorder: Records what runs.
            in_bubble: Number of compute actions before it → functions to call there.

        Raises:
            StageError: a stage, the loss function, a hook or a backward raised; names the action.
            ExecutionError: a message did not come.
        """
        self._schedule, self._given, self._recorder = schedule, given, recorder
        self._values: dict[Value, Message] = {}
        self._posted: dict[Value, Pending] = {}
        self._sending: list[Pending] = []
        self._result = StepOutput()
        for runner in self._runners.values():
            runner.wants_input_gradients = given.keep_input_gradients
        computed = 0
        group = self._around.group
        try:
            self._around.transport.begin(schedule)
            for action in schedule.actions(self.rank):
                assert isinstance(action, Action)
                group.check()
                group.progress.at(action)
                if in_bubble and action.kind in COMPUTE:
                    self._run_in_bubble(in_bubble.get(computed, ()), action)
                    computed += 1
                self._handlers[action.kind](action)
            if in_bubble:
                self._run_in_bubble(in_bubble.get(computed, ()), None)
            group.progress.at("the end of the step")
            for pending in self._sending:
                self._wait(pending)
            assert not self._posted, f"messages that nobody took: {list(self._posted)}"
            return self._result
        except ExecutionError as error:
            error.rank = self.rank if error.rank is None else error.rank
            raise
        finally:
            self._values, self._posted, self._sending = {}, {}, []
            self._result = StepOutput()
            del self._given, self._recorder, self._schedule

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        given, runner = self._given, self._runners[stage]
        main, skipped = self._take_needs(action, ValueKind.OUTPUT)
        source: Any = main
        if stage == 0:
            source, given.inputs[microbatch] = given.inputs[microbatch], None
        work = Work(
            microbatch=microbatch,
            train=given.train,
            extras=given.extras[microbatch],
            row_divisor=given.row_divisors[microbatch],
            loss_scale=given.loss_scale,
        )
        if stage == max(self._runners):  # forwards of a microbatch ascend, so nobody reads it again
            given.extras[microbatch] = {}
        with self._at_work(action):
            self._call_hooks("before_forward", action, source)
            with self._seeded(action):
                output, terms = runner.forward(work, source, skipped)
                del source
                self._result.added += [
                    AddedTerm(name, microbatch, stage, term.scaled) for name, term in terms
                ]
                if stage == self._schedule.num_stages - 1:
                    self._finish_forward(runner, work, output)
                else:
                    self._leave(runner, work, output)
            self._call_hooks("after_forward", action, output)

    def _leave(self, runner: StageRunner, work: Work, output: Any) -> None:
        message, skips = runner.leave(work, output)
        stage, microbatch = runner.index, work.microbatch
        self._values[Value(ValueKind.OUTPUT, stage, microbatch)] = message
        for target, one in skips.items():
            self._values[Value(ValueKind.OUTPUT, stage, microbatch, target)] = one

    def _finish_forward(self, runner: StageRunner, work: Work, output: Any) -> None:
        given, microbatch = self._given, work.microbatch
        if given.keep_outputs:  # as they are now: the stage or the loss may write to them again
            leaves, spec = flatten(output, where="the output of the last stage")
            copies = [leaf.detach().clone() for leaf in leaves]
            self._result.outputs[microbatch] = unflatten(spec, copies)
        # without a loss function, an evaluation cannot know beforehand whether outputs are losses
        if given.has_loss or (not given.loss_fns and _is_number(output)):
            target = None
            if given.targets:
                target, given.targets[microbatch] = given.targets[microbatch], None
            main = given.loss_fns[given.loss_index] if given.loss_fns else None
            divisor = given.divisors[microbatch]
            self._result.losses[microbatch] = runner.loss(work, output, target, main, divisor)
            for index, other in enumerate(given.loss_fns):
                if index != given.loss_index:
                    with torch.no_grad():
                        value = check_loss(other(output, target), microbatch) / divisor
                    self._result.added.append(
                        AddedTerm(f"loss[{index}]", microbatch, runner.index, value)
                    )

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        gradient, chained = self._take_needs(action, ValueKind.GRADIENT)
        with self._at_work(action):
            self._call_hooks("before_backward", action, gradient)
            with self._seeded(action):
                returned, skips = self._runners[stage].backward(microbatch, gradient, chained)
            if stage > 0:
                self._values[Value(ValueKind.GRADIENT, stage, microbatch)] = returned
            elif self._given.keep_input_gradients:
                self._result.input_gradients[microbatch] = returned
            for low, message in skips.items():
                self._values[Value(ValueKind.GRADIENT, stage, microbatch, low)] = message
            self._call_hooks("after_backward", action, returned if stage > 0 else None)

    def _take_needs(
        self, action: Action, kind: ValueKind
    ) -> tuple[Message | None, dict[int, Message]]:
        """The neighbour's message and those of skip connections, once all are there."""
        main: Message | None = None
        skipped: dict[int, Message] = {}
        for value in needs(action, self._schedule.num_stages, self._schedule.skips):
            if value.kind is not kind:
                continue
            message = self._take(value)
            if value.target is None:
                main = message
            else:
                skipped[value.stage] = message
        return main, skipped

    def _take(self, value: Value) -> Message:
        """What this rank computed itself, or a posted receive: waits for its message."""
        pending = self._posted.pop(value, None)
        if pending is None:
            return self._values.pop(value)
        message = self._wait(pending)
        assert message is not None, "a receive ends with a message"
        return message

    def _wait(self, pending: Pending) -> Message | None:
        """Wait for a transfer, so that others can see what for."""
        progress = self._around.group.progress
        progress.waits_for(pending)
        message = pending.wait(self._around.timeout_s)
        progress.waits_no_more()
        return message

    def _send(self, action: Action) -> None:
        value = carried(action)
        assert value is not None
        message = self._values[value]
        channel = channel_of(action, self._schedule)
        with self._named(action):
            self._around.check_outgoing(action, message, self._given.train)
            pending = self._around.transport.send(channel, action, message)
        self._sending = [one for one in self._sending if not one.is_done]
        self._sending.append(pending)
        if self._recorder is not None:
            self._recorder.transfer(pending)

    def _receive(self, action: Action) -> None:
        value = carried(action)
        assert value is not None
        channel = channel_of(action, self._schedule)
        pending = self._around.transport.receive(channel, action)
        self._posted[value] = pending
        if self._recorder is not None:
            self._recorder.transfer(pending)

    def _free(self, action: Action) -> None:
        kind = ValueKind.OUTPUT if action.kind is Kind.FREE_F else ValueKind.GRADIENT
        del self._values[Value(kind, action.stage, action.microbatch, action.peer)]

    def _call_hooks(self, location: str, action: Action, value: Any) -> None:
        hooks = self._around.hooks.at(location)
        if not hooks:
            return
        if isinstance(value, Message):
            value = unflatten(value.layout.spec, value.tensors)
        event = HookEvent(
            location=location,
            step=self._given.number,
            stage=action.stage,
            microbatch=action.microbatch,
            train=self._given.train,
            value=value,
        )
        for hook in tuple(hooks):
            hook(event)

    def _run_in_bubble(
        self, functions: Sequence[Callable[[], None]], before: Action | None
    ) -> None:
        for function in functions:
            try:
                function()
            except Exception as error:
                place = "at the end of the step" if before is None else f"before {before}"
                raise StageError(
                    f"rank {self.rank}: a bubble hook {place} raised "
                    f"{type(error).__name__}: {error}",
                    rank=self.rank,
                    action=None if before is None else str(before),
                ) from error

    @contextmanager
    def _at_work(self, action: Action) -> Iterator[None]:
        """Around user code: records, and says where an exception happened."""
        with self._named(action), ExitStack() as stack:
            if self._recorder is not None:
                stack.enter_context(self._recorder.span(action))
                starts = action.kind is Kind.F and self._given.train
                self._recorder.held(self.live + (1 if starts else 0))
            yield
        if self._recorder is not None:
            self._recorder.held(self.live)

    @contextmanager
    def _named(self, action: Action) -> Iterator[None]:
        """Says where an exception happened."""
        try:
            yield
        except ExecutionError:
            raise
        except Exception as error:
            raise StageError(
                f"rank {self.rank}: {action} (stage {action.stage}, microbatch "
                f"{action.microbatch}) raised {type(error).__name__}: {error}",
                rank=self.rank,
                action=str(action),
            ) from error

    def _seeded(self, action: Action) -> AbstractContextManager[None]:
        """Around a stage, and not around hooks: what they draw is none of the stage's numbers."""
        seeder = self._around.seeder
        if seeder is None:
            return nullcontext()
        return seeder.at_work(
            self._runners[action.stage].module,
            action.stage,
            self._given.number,
            action.microbatch,
            train=self._given.train,
            backward=action.kind is not Kind.F,
        )


def _is_number(output: Any) -> bool:
    """Whether an output is a tensor without dimensions, by itself or in a tuple of one."""
    if isinstance(output, tuple) and len(output) == 1:
        output = output[0]
    return isinstance(output, torch.Tensor) and output.ndim == 0


def channels_of_rank(schedule: Schedule, rank: int) -> list[Channel]:
    """The channels that start or end on a rank, in order of first use."""
    found: dict[Channel, None] = {}
    for action in schedule.actions(rank):
        if isinstance(action, Action) and carried(action) is not None:
            found[channel_of(action, schedule)] = None
    return list(found)
