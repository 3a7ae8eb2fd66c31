"""The one executor: a loop over a rank's lowered actions and a table kind → handler.

It knows nothing of any particular schedule. What an action needs lies in the tables of the step
(outputs and gradients by stage and microbatch); what a RECV posted is waited for by the action
that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import ExecutionError, StageError
from stretto.ir import Action, Channel, Kind, Schedule, Value, ValueKind, carried, channel_of
from stretto.runtime.record import Recorder
from stretto.runtime.stage import LossTerm, StageRunner
from stretto.runtime.tree import flatten, unflatten
from stretto.runtime.wire.message import Message
from stretto.runtime.wire.transport import Pending, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What a rank was given for one step, cut into microbatches.

    Args:
        inputs: For the first stage, per microbatch; empty elsewhere.
        targets: For the last stage, per microbatch; empty if there is no loss to compute.
        extras: Keyword values per microbatch.
        divisors: What each microbatch's loss is divided by.
        loss_fn: Called as `loss_fn(output, target)`; None if the output is the loss.
        has_loss: Whether the last stage computes a loss.
        keep_outputs: Whether the last stage's outputs are kept.
        train: Whether gradients are computed.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any]
    extras: Sequence[Mapping[str, Any]]
    divisors: Sequence[float]
    loss_fn: Callable[..., Any] | None
    has_loss: bool
    keep_outputs: bool
    train: bool


@dataclass(slots=True)
class StepOutput:
    """What a rank's part of a step produced, by microbatch."""

    losses: dict[int, LossTerm] = field(default_factory=dict[int, LossTerm])
    outputs: dict[int, Any] = field(default_factory=dict[int, Any])


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


class Executor:
    """Runs one rank's part of lowered schedules.

    Args:
        rank: This rank.
        runners: This rank's stages.
        transport: Carries messages between ranks.
        timeout_s: How long one message may be waited for.
    """

    def __init__(
        self,
        rank: int,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._runners = runners
        self._transport = transport
        self._timeout_s = timeout_s
        self.current: Action | None = None
        """The action being run, for error messages; None between steps."""
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

    def forget(self) -> None:
        """Drop every graph, after a step that failed."""
        for runner in self._runners.values():
            runner.forget()

    def run(
        self, schedule: Schedule, given: StepInput, recorder: Recorder | None = None
    ) -> StepOutput:
        """Run this rank's actions of a lowered schedule, in order.

        Raises:
            StageError: a stage, the loss function or a backward raised; names the action.
            ExecutionError: a message did not come.
        """
        self._schedule, self._given, self._recorder = schedule, given, recorder
        self._values: dict[Value, Message | None] = {}
        self._posted: dict[Value, Pending] = {}
        self._sending: list[Pending] = []
        self._result = StepOutput()
        try:
            for action in schedule.actions(self.rank):
                assert isinstance(action, Action)
                self.current = action
                self._handlers[action.kind](action)
            for pending in self._sending:
                self.current = pending.action
                pending.wait(self._timeout_s)
            assert not self._posted, f"messages that nobody took: {list(self._posted)}"
            return self._result
        except ExecutionError as error:
            error.rank = self.rank if error.rank is None else error.rank
            raise
        finally:
            self._values, self._posted, self._sending = {}, {}, []
            self._result = StepOutput()
            del self._given

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        runner, given = self._runners[stage], self._given
        source: Any = (
            given.inputs[microbatch]
            if runner.is_first
            else self._take(Value(ValueKind.OUTPUT, stage - 1, microbatch))
        )
        with self._at_work(action):
            extras = given.extras[microbatch]
            output = runner.forward(microbatch, source, extras, train=given.train)
            if stage == self._schedule.num_stages - 1:
                self._finish_forward(runner, microbatch, output)
            else:
                message = runner.leave(microbatch, output, train=given.train)
                self._values[Value(ValueKind.OUTPUT, stage, microbatch)] = message

    def _finish_forward(self, runner: StageRunner, microbatch: int, output: Any) -> None:
        given = self._given
        if given.has_loss:
            target = given.targets[microbatch] if given.targets else None
            self._result.losses[microbatch] = runner.loss(
                microbatch,
                output,
                target,
                given.loss_fn,
                given.divisors[microbatch],
                train=given.train,
            )
        if given.keep_outputs:
            leaves, spec = flatten(output, where="the output of the last stage")
            self._result.outputs[microbatch] = unflatten(spec, [leaf.detach() for leaf in leaves])

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        gradient: Message | None = None
        if stage < self._schedule.num_stages - 1:
            gradient = self._take(Value(ValueKind.GRADIENT, stage + 1, microbatch))
        with self._at_work(action):
            returned = self._runners[stage].backward(microbatch, gradient)
            if stage > 0:
                self._values[Value(ValueKind.GRADIENT, stage, microbatch)] = returned

    def _take(self, value: Value) -> Message | None:
        """What this rank computed itself, or a posted receive: waits for its message."""
        pending = self._posted.pop(value, None)
        if pending is None:
            return self._values.pop(value)
        return pending.wait(self._timeout_s)

    def _send(self, action: Action) -> None:
        value = carried(action)
        assert value is not None
        message = self._values[value]
        assert message is not None
        channel = channel_of(action, self._schedule)
        pending = self._transport.send(channel, action, message)
        self._sending = [one for one in self._sending if not one.is_done]
        self._sending.append(pending)
        if self._recorder is not None:
            self._recorder.transfer(pending)

    def _receive(self, action: Action) -> None:
        value = carried(action)
        assert value is not None
        pending = self._transport.receive(channel_of(action, self._schedule), action)
        self._posted[value] = pending
        if self._recorder is not None:
            self._recorder.transfer(pending)

    def _free(self, action: Action) -> None:
        kind = ValueKind.OUTPUT if action.kind is Kind.FREE_F else ValueKind.GRADIENT
        del self._values[Value(kind, action.stage, action.microbatch)]

    def _at_work(self, action: Action) -> _AtWork:
        return _AtWork(self, action, self._recorder)

    @property
    def live(self) -> int:
        """Stage activations this rank holds."""
        return sum(runner.live for runner in self._runners.values())


class _AtWork:
    """Around user code: records the span, and says where an exception happened."""

    def __init__(self, executor: Executor, action: Action, recorder: Recorder | None) -> None:
        self._executor = executor
        self._action = action
        self._recorder = recorder
        self._span = recorder.span(action) if recorder is not None else None

    def __enter__(self) -> None:
        if self._recorder is not None and self._span is not None:
            self._span.__enter__()
            starts = self._action.kind is Kind.F and self._executor._given.train
            self._recorder.held(self._executor.live + (1 if starts else 0))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ExecutionError):
            action, rank = self._action, self._executor.rank
            raise StageError(
                f"rank {rank}: {action} (stage {action.stage}, microbatch {action.microbatch}) "
                f"raised {type(error).__name__}: {error}",
                rank=rank,
                action=str(action),
            ) from error
        if self._span is not None and error is None:
            self._span.__exit__(None, None, None)


def channels_of_rank(schedule: Schedule, rank: int) -> list[Channel]:
    """The channels that start or end on a rank, in order of first use."""
    found: dict[Channel, None] = {}
    for action in schedule.actions(rank):
        if isinstance(action, Action) and carried(action) is not None:
            found[channel_of(action, schedule)] = None
    return list(found)
