"""The engine: one call per step, the same on every rank.

It proves the schedule it is given, checks with the other ranks that all can start, cuts the batch,
lets the executor run this rank's actions, and delivers the loss. It never changes the model, its
gradients, its mode or random state except by running forwards and backwards.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stretto.errors import (
    EndOfData,
    EngineClosedError,
    InputError,
    ScheduleError,
    TransportError,
)
from stretto.ir import Action, Communicators, Schedule
from stretto.ir.calling import parameters_of
from stretto.ir.files import schedule_to_json
from stretto.passes import bubble_slots, forward_part, lower
from stretto.runtime.agreement import agree, require_equal
from stretto.runtime.batch import merge_input_gradients, merge_outputs
from stretto.runtime.checks import OutgoingChecks
from stretto.runtime.data import decode_batch, draw, encode_batch
from stretto.runtime.executor import (
    RUNNABLE,
    Executor,
    LossFunction,
    StepInput,
    StepOutput,
    Surroundings,
    channels_of_rank,
)
from stretto.runtime.hooks import Hook, HookHandle, Hooks
from stretto.runtime.norm import check_clip_arguments, local_norms, total_norm, unique_parameters
from stretto.runtime.random_state import LayerSeeder
from stretto.runtime.record import Recorder, timeline_from_records
from stretto.runtime.report import gather_losses
from stretto.runtime.result import StepResult
from stretto.runtime.skips import SkipTable, declared_skips, skip_table
from stretto.runtime.stage import StageRunner
from stretto.runtime.step import Duties, StepCall, check_call, cut_call, settle_call
from stretto.runtime.tree import unflatten
from stretto.runtime.wire.resolve import resolve_group
from stretto.runtime.wire.transport import Transport
from stretto.verify import lower_for, verify

_LOG = logging.getLogger("stretto")


class Engine:
    """Runs the steps of one pipeline on one rank.

    Args:
        stages: This rank's stages by index, as `stretto.split` returns them. A stage is called
            with the previous stage's value: a tuple as positional arguments, a dict as keywords,
            anything else as one argument.
        schedule: What all ranks run; it is verified first.
        loss_fn: Called as `loss_fn(output, target)` on the last stage; returns the mean over its
            rows (or a sum, if steps give a `normaliser`). Several may be given; `loss_index` says
            which one drives the backward, the others are reported. None: the last stage's output
            is the loss.
        group: The ranks of the pipeline: a `torch.distributed` process group, a one-dimensional
            device mesh, a group of an `InProcessHub`, or None for one rank.
        device: Where received tensors are put; by default the device of the stages' parameters.
        loss_index: Which of several loss functions drives the backward.
        seed: Random numbers (dropout) are a function of this seed, the step, the microbatch and
            the layer, whatever the split and the schedule. None: the engine leaves the random
            state alone, and masks depend on which stages a rank holds.
        data_rank: The rank whose batch is used; it is sent to all ranks, and what they are given
            is ignored. None: every rank that needs a part of the batch is given it.
        deliver_loss: Whether every rank gets the loss; otherwise only `loss_rank` does.
        check_finite: Whether outgoing tensors are checked for nan and inf.
        fixed_layouts: Whether a message of other structure, shape or dtype than the first of its
            edge is an error in training.
        record: Whether steps record what ran (`result.timeline`); can be changed at any time, on
            all ranks alike.
        step_timeout_s: How long a rank waits for another before it gives up, in seconds.
        transport: What carries messages between processes: `sockets` (the ranks of one host; TCP
            across hosts), `gloo`, or `auto`: sockets where all ranks are CPU ranks of one host,
            else gloo.

    Raises:
        InputError: an argument cannot be used, or another rank was given something else. Raised
            on every rank.
        ScheduleError: the schedule breaks a rule; all violations are named.
        ExecutionError: another rank did not come, or failed meanwhile.

    Example:
        >>> schedule = one_f_one_b(num_ranks=1, num_microbatches=4)
        >>> engine = Engine(split(layers, schedule, rank=0), schedule, loss_fn=mse_loss)
        >>> engine.step(inputs, targets).loss.item()
    """

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        schedule: Schedule,
        *,
        loss_fn: LossFunction | Sequence[LossFunction] | None = None,
        group: object = None,
        device: torch.device | str | None = None,
        loss_index: int = 0,
        seed: int | None = 0,
        data_rank: int | None = None,
        deliver_loss: bool = True,
        check_finite: bool = False,
        fixed_layouts: bool = False,
        record: bool = False,
        step_timeout_s: float = 300.0,
        transport: str = "auto",
    ) -> None:
        self.stages = dict(stages)
        self.device = _default_device(self.stages) if device is None else torch.device(device)
        self._group = resolve_group(
            group,
            transport=transport,
            on_cpu=self.device.type == "cpu",
            timeout_s=step_timeout_s,
        )
        self.record = record
        self.step_number = 0
        """Number of the next training step; a part of the random rule, to be set on resuming."""
        self._loss_fns = _as_sequence(loss_fn)
        self._loss_index = loss_index
        self._seed = seed
        self._data_rank = data_rank
        self._deliver_loss = deliver_loss
        self._closed: str | None = None
        self._is_running = False
        self._eval_programs: dict[int, Schedule] = {}
        self._microbatch_rows: int | None = None
        self._bubble_hooks: Mapping[int, Sequence[Callable[[], None]]] | None = None
        self._hooks = Hooks()
        self._executor: Executor | None = None
        self._transport: Transport | None = None
        self._metadata_before = 0
        self._seeder = None if seed is None else LayerSeeder(seed, self.device)
        self._checks = OutgoingChecks(finite=check_finite, fixed_layouts=fixed_layouts)
        self._timeout_s = step_timeout_s
        try:
            self.schedule, skips = self._agree_on_schedule(schedule)
            # the same on all ranks, and so is its verdict
            self._program = _prove(self.schedule, self._group.communicators)
            self._duties = Duties(rank=self.rank, schedule=self.schedule, loss_fns=self._loss_fns)
            with self._together():
                self._runners = {
                    index: StageRunner(index, module, device=self.device, skips=skips)
                    for index, module in self.stages.items()
                }
                self._connect()
        except BaseException as error:
            self._close(f"it could not be made: {error}")
            raise
        _LOG.info(
            "rank %d of %d: stages %s of %d, %d microbatches, over %s",
            self.rank,
            self.num_ranks,
            list(self.stages),
            self.schedule.num_stages,
            self.schedule.num_microbatches,
            type(self._transport).__name__,
        )

    def _connect(self) -> Executor:
        """Make a transport, and what runs over it: at first, and after each step that failed."""
        self._transport = self._group.connect(channels_of_rank(self._program, self.rank))
        around = Surroundings(
            group=self._group,
            transport=self._transport,
            seeder=self._seeder,
            hooks=self._hooks,
            check_outgoing=self._checks.check,
            timeout_s=self._timeout_s,
        )
        self._executor = Executor(self.rank, self._runners, around)
        return self._executor

    def _gather(self, payload: bytes, what: str) -> list[bytes]:
        with self._together():
            return self._group.gather(payload, what)

    def _agree_on_schedule(self, schedule: Schedule) -> tuple[Schedule, SkipTable]:
        """The schedule with the model's skip connections, once all ranks were given the same."""

        def check() -> tuple[None, Mapping[str, Any]]:
            self._check_construction(schedule)
            digest = hashlib.sha256(schedule_to_json(schedule).encode()).hexdigest()[:16]
            skips = {str(index): declared_skips(module) for index, module in self.stages.items()}
            settings = [self._loss_index, self._seed, self._data_rank, self._deliver_loss]
            return None, {"schedule": digest, "settings": settings, "skips": skips}

        notes = agree(self._gather, check, "the making of an engine")[1]
        require_equal(notes, "schedule", "the schedule")
        require_equal(notes, "settings", "loss_index, seed, data_rank and deliver_loss")
        declared = {int(stage): one for note in notes for stage, one in note["skips"].items()}
        skips = skip_table(declared, schedule.num_stages)
        return replace(schedule, skips=skips.edges()) if skips.routes else schedule, skips

    def _check_construction(self, schedule: Schedule) -> None:
        if self._group.num_ranks != schedule.num_ranks:
            raise InputError(
                f"the group has {self._group.num_ranks} ranks, the schedule {schedule.num_ranks}; "
                "they must be the same"
            )
        mine = schedule.placement.stages_of(self.rank)
        if tuple(sorted(self.stages)) != mine:
            raise InputError(
                f"rank {self.rank} was given the stages {sorted(self.stages)}; by the schedule's "
                f"placement it owns {list(mine)}"
            )
        if self._data_rank is not None and not 0 <= self._data_rank < schedule.num_ranks:
            raise InputError(
                f"data_rank is {self._data_rank}; ranks are 0..{schedule.num_ranks - 1}"
            )
        count = len(self._loss_fns)
        if not 0 <= self._loss_index < max(1, count):
            raise InputError(f"loss_index is {self._loss_index}; there are {count} loss functions")

    @property
    def rank(self) -> int:
        """This rank within the pipeline."""
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return self._group.num_ranks

    @property
    def loss_rank(self) -> int:
        """The rank that owns the last stage, where the loss is computed."""
        return self._duties.loss_rank

    @property
    def program(self) -> Schedule:
        """The lowered schedule that training steps run, with the transfers of all ranks."""
        return self._program

    @property
    def metadata_count(self) -> int:
        """How many message layouts this rank has sent; it stands still while shapes do."""
        now = 0 if self._transport is None else self._transport.metadata_count()
        return self._metadata_before + now

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        normaliser: float | None = None,
        loss_scale: float = 1.0,
        return_outputs: bool = False,
        return_input_gradients: bool = False,
        **extras: Any,
    ) -> StepResult:
        """Run forwards and backwards of one batch; gradients are added to `.grad`.

        Args:
            inputs: The batch for the first stage: a tuple is spread as positional arguments, a
                dict as keywords, anything else is one argument. Tensors are cut on dimension 0
                (see `stretto.along` and `stretto.whole`); a list is taken as ready-made
                microbatches. An iterator, or a function without arguments, is asked once and gives
                (inputs, targets) or (inputs, targets, extras). Other ranks may pass None.
            targets: The second argument of the loss function, cut likewise; needed by the rank
                of the last stage.
            normaliser: The loss function returns sums; each is divided by this number before its
                backward (ranks that do not know it may pass None). By default it returns means,
                and microbatch i of n_i rows counts as loss / (N / n_i).
            loss_scale: What everything that enters the backward is multiplied by; reported losses
                are not.
            return_outputs: Whether `result.outputs` is filled on `loss_rank`.
            return_input_gradients: Whether `result.input_gradients` is filled on the rank of the
                first stage, for tensors of the batch that require a gradient.
            extras: Keyword values for every stage whose signature names them, cut likewise.

        Raises:
            InputError: the batch cannot be used; raised on every rank, before anything is sent.
            EndOfData: the iterator of a rank has ended; raised on every rank.
            Exception: whatever an iterator or function raises, on its rank; an `InputError` that
                quotes it on the others.
            StageError: a stage, the loss, a hook or a backward raised. Like the next one it leaves
                the engine ready for another step; what `.grad` holds then is a part of this one's.
            RemoteError: that happened on another rank, which is named; or another rank has left or
                died, and the engine is closed.
            HangError: another rank did not come within `step_timeout_s`; says where every rank is;
                the engine is closed.
            TransportError: the connection to another rank broke; the engine is closed.
            EngineClosedError: the engine was closed before.
        """
        return self._run(
            StepCall(
                inputs=inputs,
                targets=targets,
                extras=extras,
                normaliser=normaliser,
                num_microbatches=None,
                return_outputs=return_outputs,
                return_input_gradients=return_input_gradients,
                loss_scale=loss_scale,
                loss_index=self._loss_index,
                train=True,
            )
        )

    def eval_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        num_microbatches: int | None = None,
        normaliser: float | None = None,
        loss_index: int | None = None,
        return_outputs: bool | None = None,
        **extras: Any,
    ) -> StepResult:
        """Run the forwards of one batch of any size, in evaluation mode, without gradients.

        Modules are put into evaluation mode and then back into the mode each of them was in.

        Args:
            inputs: As in `step`.
            targets: As in `step`; None on the rank of the last stage: no loss is computed. (If the
                engine has no loss function, outputs without dimensions are losses.)
            num_microbatches: How many microbatches to cut; by default so many that none is
                larger than in the last training step, or as many as in the schedule.
            normaliser: As in `step`.
            loss_index: Which of several loss functions is the loss; by default that of training.
            return_outputs: Whether `result.outputs` is filled on `loss_rank`; by default where no
                loss is computed.
            extras: As in `step`.

        Raises:
            InputError, EndOfData, StageError, ExecutionError, EngineClosedError: as in `step`.
        """
        call = StepCall(
            inputs=inputs,
            targets=targets,
            extras=extras,
            normaliser=normaliser,
            num_microbatches=num_microbatches,
            return_outputs=return_outputs,
            return_input_gradients=False,
            loss_scale=1.0,
            loss_index=self._loss_index if loss_index is None else loss_index,
            train=False,
        )
        with _evaluation_mode(self.stages):
            return self._run(call)

    def run_stage(self, stage: int, value: Any, **extras: Any) -> Any:
        """Call one of this rank's stages by itself: nothing is sent, kept or seeded.

        Args:
            stage: Index of the stage.
            value: What the stage before returned, handed over as in a step.
            extras: Keyword values, as in a step.

        Raises:
            InputError: this rank does not own the stage.
        """
        if stage not in self.stages:
            raise InputError(
                f"rank {self.rank} has no stage {stage}; its stages are {sorted(self.stages)}"
            )
        args, keywords = parameters_of(self.stages[stage]).arguments(value, extras)
        return self.stages[stage](*args, **keywords)

    def register_hook(self, location: str, hook: Hook) -> HookHandle:
        """Call a function around the work of this rank.

        Args:
            location: `before_forward`, `after_forward`, `before_backward` or `after_backward`.
            hook: Called with a `HookEvent`; what it raises ends the step as a stage's error does.

        Raises:
            InputError: there is no such location.
        """
        return self._hooks.register(location, hook)

    @property
    def num_bubbles(self) -> int:
        """How many rounds of a training step this rank has nothing to run; 2p - 2 in 1F1B."""
        return len(bubble_slots(self.schedule)[self.rank])

    def set_bubble_hooks(self, hooks: Sequence[Callable[[], None]] | None) -> None:
        """Call functions where this rank has nothing to run, in every training step.

        Args:
            hooks: One per bubble of this rank, in order; None takes them away.

        Raises:
            InputError: there are not as many as bubbles.
        """
        if hooks is None:
            self._bubble_hooks = None
            return
        slots = bubble_slots(self.schedule)[self.rank]
        if len(hooks) != len(slots):
            raise InputError(
                f"{len(hooks)} bubble hooks were given; rank {self.rank} has {len(slots)} bubbles"
            )
        placed: dict[int, list[Callable[[], None]]] = {}
        for slot, hook in zip(slots, hooks, strict=True):
            placed.setdefault(slot, []).append(hook)
        self._bubble_hooks = placed

    def _run(self, call: StepCall) -> StepResult:
        self._require_open()
        if self._is_running:
            raise InputError(
                "a step was called within a step of the same engine, as by a hook, a loss function "
                "or a stage; call it after the one that runs has returned"
            )
        self._is_running = True
        try:
            return self._run_alone(call)
        finally:
            self._is_running = False

    def _run_alone(self, call: StepCall) -> StepResult:
        with self._leaving_if_interrupted():
            name = f"step {self.step_number}" if call.train else "an evaluation"
            (call, blob), notes = agree(
                self._gather, partial(self._check, call), "the step", call=name
            )
            ended = [rank for rank, note in enumerate(notes) if note["ended"]]
            if ended:
                raise EndOfData(f"the data of ranks {ended} has ended", ranks=ended)
            settled = settle_call(
                notes, self._duties, self._microbatch_rows, data_rank=self._data_rank
            )
            require_equal(notes, "record", "recording")
            require_equal(notes, "step", "the step's number")
        is_training = call.train
        program = self._program if is_training else self._eval_program(settled.num_microbatches)
        with self._together():
            executor = self._executor or self._connect()
            if self._data_rank is not None and self.num_ranks > 1:
                blob = self._group.broadcast(blob, self._data_rank, "the batch of the data rank")
                call = call if self.rank == self._data_rank else decode_batch(call, blob)
            given = cut_call(call, settled, self._duties, self.step_number)
            wanted_inputs = call.inputs if given.keep_input_gradients else None
            del call, blob  # the batch itself goes with its last microbatch
            recorder = Recorder() if self.record else None
            in_bubble = self._bubble_hooks if is_training else None
            output = executor.run(program, given, recorder, in_bubble)
            result = self._result(output, given, recorder, wanted_inputs)
        if is_training and settled.sizes is not None:
            self._microbatch_rows = max(settled.sizes)
        self.step_number += is_training
        self._group.progress.at(f"the code after {name}")
        return result

    def _check(self, call: StepCall) -> tuple[tuple[StepCall, bytes | None], Mapping[str, Any]]:
        """Check this rank's part; returns the call, its batch as bytes for other ranks, a note."""
        note: dict[str, Any] = {"ended": False, "record": self.record, "step": self.step_number}
        if call.train and not torch.is_grad_enabled():
            raise InputError("step needs gradients; call it outside no_grad, or use eval_step")
        if self._data_rank is not None and self.rank != self._data_rank:
            call = replace(call, inputs=None, targets=None, extras={})
            return (call, None), {**check_call(call, self._duties, is_given=False), **note}
        try:
            call = draw(call)
        except StopIteration:
            return (call, None), {**note, "ended": True}
        is_source = self._data_rank is not None
        note = {**check_call(call, self._duties, needs_all=is_source), **note}
        return (call, encode_batch(call) if is_source and self.num_ranks > 1 else None), note

    def _eval_program(self, num_microbatches: int) -> Schedule:
        if num_microbatches not in self._eval_programs:
            forwards = forward_part(self.schedule, num_microbatches)
            self._eval_programs[num_microbatches] = _prove(forwards, self._group.communicators)
        return self._eval_programs[num_microbatches]

    def _result(
        self, output: StepOutput, given: StepInput, recorder: Recorder | None, inputs: Any
    ) -> StepResult:
        # what can fail on this rank alone comes first: the exchange ends the step on all ranks
        outputs = None
        if given.keep_outputs:
            outputs = merge_outputs([output.outputs[index] for index in sorted(output.outputs)])
        input_gradients = None
        if given.keep_input_gradients:
            gradients = {
                index: unflatten(message.layout.spec, message.tensors)
                for index, message in output.input_gradients.items()
            }
            input_gradients = merge_input_gradients(inputs, gradients, given.sizes)
        reported = gather_losses(
            self._group, output, loss_rank=self.loss_rank, deliver=self._deliver_loss
        )
        timeline = None
        if recorder is not None:
            records = self._group.gather(recorder.to_bytes(), "the records of the step")
            timeline = timeline_from_records(records)
        return StepResult(
            loss=reported.loss,
            microbatch_losses=reported.each,
            losses=reported.added,
            outputs=outputs,
            input_gradients=input_gradients,
            timeline=timeline,
            loss_rank=self.loss_rank,
        )

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the gradients of all ranks by the norm of the whole model's.

        The norm, and so the clipped gradients, equal those of `torch.nn.utils.clip_grad_norm_`
        on the unsplit model in every bit. Called on every rank.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: The p of the p-norm; `inf` for the largest absolute value.
            error_if_nonfinite: Whether a norm that is nan or inf is an error.

        Returns:
            The norm before clipping, on every rank.

        Raises:
            InputError: an argument cannot be used, or the norm is not finite and
                `error_if_nonfinite` is set.
        """
        self._require_open()

        def check() -> tuple[None, Mapping[str, Any]]:
            check_clip_arguments(max_norm, norm_type)
            norms = local_norms(unique_parameters(self.stages), norm_type)
            arguments = [float(max_norm), float(norm_type), error_if_nonfinite]
            return None, {"arguments": arguments, "norms": norms.hex()}

        with self._leaving_if_interrupted():
            notes = agree(self._gather, check, "clip_grad_norm_")[1]
            require_equal(notes, "arguments", "the arguments of clip_grad_norm_")
        gathered = [bytes.fromhex(note["norms"]) for note in notes]
        total = total_norm(gathered, norm_type, self.device)
        if error_if_nonfinite and not torch.isfinite(total):
            raise InputError(f"the gradient norm of order {norm_type} is {total.item()}")
        parameters = [parameter for _, parameter in unique_parameters(self.stages)]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def close(self) -> None:
        """Give up what the engine made: its threads and its connections.

        Ranks that still wait for this one are told; if an exception is being handled, that too.
        """
        error = sys.exc_info()[1]
        while_what = "" if error is None else f", after {type(error).__name__}: {error}"
        self._close(f"close() was called{while_what}")

    def _close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            if self._transport is not None:
                self._transport.close()
            self._group.close(reason)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed: {self._closed}", rank=self.rank)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what other ranks wait for: what goes wrong here ends the step on all of them."""
        try:
            yield
        except TransportError as error:
            told = self._group.explain(error)
            self._end_step(told)
            if told is error:
                raise
            raise told from error
        except BaseException as error:
            self._end_step(error)
            raise

    @contextmanager
    def _leaving_if_interrupted(self) -> Iterator[None]:
        """Around what all ranks raise alike, but for Ctrl-C and the like."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self._end_step(error)
            raise

    def _end_step(self, error: BaseException) -> None:
        """After an error: have the other ranks end their step, and get ready for the next one."""
        if self._closed is not None:
            return
        if self._executor is not None:
            self._executor.forget()
        self._metadata_before = self.metadata_count
        self._executor = self._transport = None
        if not self._group.fail(error):
            self._close(f"an earlier step failed: {error}")


def _prove(schedule: Schedule, communicators: Communicators | None) -> Schedule:
    """The lowered schedule, once it is proved, for these communicators if any, and runnable."""
    if schedule.placement.num_replicas > 1:
        raise InputError("the engine does not run schedules with two replicas of a stage yet")
    program = lower(schedule) if communicators is None else lower_for(schedule, communicators)
    for rank in range(program.num_ranks):
        for action in program.actions(rank):
            if not isinstance(action, Action) or action.kind not in RUNNABLE:
                raise InputError(f"rank {rank}: the engine does not run {action} yet")
    if communicators is None:
        violations = verify(program, transport="rendezvous")
    else:
        violations = verify(program, transport="nccl", communicators=communicators)
    if violations:
        listed = "\n".join(str(one) for one in violations[:10])
        raise ScheduleError(f"the schedule breaks {len(violations)} rules:\n{listed}", violations)
    return program


def _as_sequence(
    loss_fn: LossFunction | Sequence[LossFunction] | None,
) -> tuple[LossFunction, ...]:
    if loss_fn is None:
        return ()
    return tuple(loss_fn) if isinstance(loss_fn, Sequence) else (loss_fn,)


@contextmanager
def _evaluation_mode(stages: Mapping[int, torch.nn.Module]) -> Iterator[None]:
    before = [(module, module.training) for stage in stages.values() for module in stage.modules()]
    _set_modes([(module, False) for module, _ in before])
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(wanted: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    """Put modules, outer ones first, into modes; those that do more in `train` than torch do it."""
    for module, training in wanted:
        if module.training != training:
            module.train(training)


def _default_device(stages: Mapping[int, torch.nn.Module]) -> torch.device:
    """The device of the first parameter of these stages, or the CPU."""
    for index in sorted(stages):
        for parameter in stages[index].parameters():
            return parameter.device
    return torch.device("cpu")
