"""The engine: one call per step, the same on every rank.

It proves the schedule it is given, checks with the other ranks that all can start, cuts the batch,
lets the executor run this rank's actions, and delivers the loss. It never changes the model, its
gradients, its mode or random state except by running forwards and backwards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from stretto.errors import EngineClosedError, InputError, ScheduleError
from stretto.ir import Action, Schedule
from stretto.ir.files import schedule_to_json
from stretto.passes import forward_part, lower
from stretto.runtime.agreement import agree, require_equal
from stretto.runtime.batch import merge_outputs
from stretto.runtime.executor import (
    RUNNABLE,
    Executor,
    StepInput,
    StepOutput,
    channels_of_rank,
)
from stretto.runtime.norm import check_clip_arguments, local_norms, total_norm, unique_parameters
from stretto.runtime.record import Recorder, timeline_from_records
from stretto.runtime.result import StepResult
from stretto.runtime.stage import StageRunner
from stretto.runtime.step import Duties, StepCall, check_call, cut_call, settle_call
from stretto.runtime.wire.resolve import resolve_group
from stretto.verify import verify


class Engine:
    """Runs the steps of one pipeline on one rank.

    Args:
        stages: This rank's stages by index, as `stretto.split` returns them.
        schedule: What all ranks run; it is verified first.
        loss_fn: Called as `loss_fn(output, target)` on the last stage; returns the mean over its
            rows (or a sum, if steps give a `normaliser`). None: the last stage's output is the
            loss.
        group: The ranks of the pipeline: a `torch.distributed` process group, a one-dimensional
            device mesh, a group of an `InProcessHub`, or None for one rank.
        device: Where received tensors are put; by default the device of the stages' parameters.
        deliver_loss: Whether every rank gets the loss; otherwise only `loss_rank` does.
        record: Whether steps record what ran (`result.timeline`); can be changed at any time, on
            all ranks alike.
        step_timeout_s: How long a rank waits for another before it gives up, in seconds.

    Raises:
        InputError: an argument cannot be used, or another rank was given something else. Raised
            on every rank.
        ScheduleError: the schedule breaks a rule; all violations are named.

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
        loss_fn: Callable[..., Any] | None = None,
        group: object = None,
        device: torch.device | str | None = None,
        deliver_loss: bool = True,
        record: bool = False,
        step_timeout_s: float = 300.0,
    ) -> None:
        self._group = resolve_group(group, timeout_s=step_timeout_s)
        self.schedule = schedule
        self.stages = dict(stages)
        self.record = record
        self._duties = Duties(rank=self._group.rank, schedule=schedule, loss_fn=loss_fn)
        self._deliver_loss = deliver_loss
        self._closed: str | None = None
        self._eval_programs: dict[int, Schedule] = {}
        self._microbatch_rows: int | None = None
        try:
            self._program, notes = agree(self._group, self._check_construction, "the engine")
            require_equal(notes, "schedule", "the schedule")
            require_equal(notes, "deliver_loss", "deliver_loss")
        except BaseException:
            self._group.close()
            raise
        self.device = _default_device(self.stages) if device is None else torch.device(device)
        self._parameters = unique_parameters(self.stages)
        self._transport = self._group.connect(channels_of_rank(self._program, self.rank))
        runners = {
            index: StageRunner(index, module, is_first=index == 0, device=self.device)
            for index, module in self.stages.items()
        }
        self._executor = Executor(self.rank, runners, self._transport, step_timeout_s)

    def _check_construction(self) -> tuple[Schedule, Mapping[str, Any]]:
        schedule = self.schedule
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
        digest = hashlib.sha256(schedule_to_json(schedule).encode()).hexdigest()[:16]
        return _prove(schedule), {"schedule": digest, "deliver_loss": self._deliver_loss}

    @property
    def rank(self) -> int:
        """This rank within the pipeline."""
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return self.schedule.num_ranks

    @property
    def loss_rank(self) -> int:
        """The rank that owns the last stage, where the loss is computed."""
        return self._duties.loss_rank

    @property
    def metadata_count(self) -> int:
        """How many message layouts this rank has sent; it stands still while shapes do."""
        return self._transport.metadata_count()

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        normaliser: float | None = None,
        return_outputs: bool = False,
        **extras: Any,
    ) -> StepResult:
        """Run forwards and backwards of one batch; gradients are added to `.grad`.

        Args:
            inputs: The batch for the first stage: a tuple is spread as positional arguments, a
                dict as keywords, anything else is one argument. Tensors are cut on dimension 0; a
                list is taken as ready-made microbatches. Other ranks may pass None.
            targets: The second argument of the loss function, cut likewise; needed by the rank
                of the last stage.
            normaliser: The loss function returns sums; each is divided by this number before its
                backward. By default it returns means, and microbatch i of n_i rows counts as
                loss / (N / n_i).
            return_outputs: Whether `result.outputs` is filled on `loss_rank`.
            extras: Keyword values for every stage whose signature names them, cut likewise.

        Raises:
            InputError: the batch cannot be used; raised on every rank, before anything is sent.
            StageError: a stage, the loss or a backward raised; the engine is closed.
            ExecutionError: another rank failed; the engine is closed.
            EngineClosedError: the engine was closed before.
        """
        call = StepCall(
            inputs=inputs,
            targets=targets,
            extras=extras,
            normaliser=normaliser,
            num_microbatches=None,
            return_outputs=return_outputs,
            train=True,
        )
        return self._run(call)

    def eval_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        num_microbatches: int | None = None,
        normaliser: float | None = None,
        return_outputs: bool = False,
        **extras: Any,
    ) -> StepResult:
        """Run the forwards of one batch of any size, in evaluation mode, without gradients.

        Modules are put into evaluation mode and then back into the mode each of them was in.

        Args:
            inputs: As in `step`.
            targets: As in `step`; None on the rank of the last stage: no loss is computed.
            num_microbatches: How many microbatches to cut; by default so many that none is
                larger than in the last training step, or as many as in the schedule.
            normaliser: As in `step`.
            return_outputs: As in `step`.
            extras: As in `step`.

        Raises:
            InputError, StageError, ExecutionError, EngineClosedError: as in `step`.
        """
        call = StepCall(
            inputs=inputs,
            targets=targets,
            extras=extras,
            normaliser=normaliser,
            num_microbatches=num_microbatches,
            return_outputs=return_outputs,
            train=False,
        )
        with _evaluation_mode(self.stages):
            return self._run(call)

    def _run(self, call: StepCall) -> StepResult:
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed: {self._closed}", rank=self.rank)
        notes = agree(self._group, lambda: (None, self._check(call)), "the step")[1]
        settled = settle_call(notes, self._duties, self._microbatch_rows)
        require_equal(notes, "record", "recording")
        if call.train and settled.sizes is not None:
            self._microbatch_rows = max(settled.sizes)
        given = cut_call(call, settled, self._duties)
        program = self._program if call.train else self._eval_program(settled.num_microbatches)
        recorder = Recorder() if self.record else None
        with self._closing_on_failure():
            output = self._executor.run(program, given, recorder)
            return self._result(output, given, recorder)

    def _check(self, call: StepCall) -> Mapping[str, Any]:
        if call.train and not torch.is_grad_enabled():
            raise InputError("step needs gradients; call it outside no_grad, or use eval_step")
        return {**check_call(call, self._duties), "record": self.record}

    def _eval_program(self, num_microbatches: int) -> Schedule:
        if num_microbatches not in self._eval_programs:
            forwards = forward_part(self.schedule, num_microbatches)
            self._eval_programs[num_microbatches] = _prove(forwards)
        return self._eval_programs[num_microbatches]

    def _result(
        self, output: StepOutput, given: StepInput, recorder: Recorder | None
    ) -> StepResult:
        loss, each = _sum_losses(output)
        if self._deliver_loss and given.has_loss:
            told = json.dumps([loss, each]).encode() if self.rank == self.loss_rank else b""
            loss, each = json.loads(self._group.gather(told)[self.loss_rank])
        timeline = None
        if recorder is not None:
            timeline = timeline_from_records(self._group.gather(recorder.to_bytes()))
        outputs = None
        if given.keep_outputs:
            outputs = merge_outputs([output.outputs[index] for index in sorted(output.outputs)])
        return StepResult(
            loss=None if loss is None else torch.tensor(loss, dtype=torch.float64),
            microbatch_losses=None if not each else torch.tensor(each, dtype=torch.float64),
            outputs=outputs,
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
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed: {self._closed}", rank=self.rank)
        check_clip_arguments(max_norm, norm_type)
        gathered = self._group.gather(local_norms(self._parameters, norm_type))
        total = total_norm(gathered, norm_type, self.device)
        if error_if_nonfinite and not torch.isfinite(total):
            raise InputError(f"the gradient norm of order {norm_type} is {total.item()}")
        parameters = [parameter for _, parameter in self._parameters]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def close(self) -> None:
        """Give up what the engine made: its threads and its own process group."""
        self._close("it was closed by the user")

    def _close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self._transport.close()
            self._group.close()

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._executor.forget()
            self._group.abort(error)
            self._close(f"an earlier step failed: {error}")
            raise


def _prove(schedule: Schedule) -> Schedule:
    """The lowered schedule, once it is proved and runnable."""
    if schedule.placement.num_replicas > 1:
        raise InputError("the engine does not run schedules with two replicas of a stage yet")
    program = lower(schedule)
    for rank in range(program.num_ranks):
        for action in program.actions(rank):
            if not isinstance(action, Action) or action.kind not in RUNNABLE:
                raise InputError(f"rank {rank}: the engine does not run {action} yet")
    violations = verify(program, transport="rendezvous")
    if violations:
        listed = "\n".join(str(one) for one in violations[:10])
        raise ScheduleError(f"the schedule breaks {len(violations)} rules:\n{listed}", violations)
    return program


def _sum_losses(output: StepOutput) -> tuple[float | None, list[float]]:
    """The reported loss, added ascending in its own dtype, and the loss of each microbatch."""
    terms = [output.losses[index] for index in sorted(output.losses)]
    if not terms:
        return None, []
    total = terms[0].scaled
    for term in terms[1:]:
        total = total + term.scaled
    return float(total), [float(term.value) for term in terms]


@contextmanager
def _evaluation_mode(stages: Mapping[int, torch.nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for stage in stages.values() for module in stage.modules()]
    for stage in stages.values():
        stage.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _default_device(stages: Mapping[int, torch.nn.Module]) -> torch.device:
    """The device of the first parameter of these stages, or the CPU."""
    for index in sorted(stages):
        for parameter in stages[index].parameters():
            return parameter.device
    return torch.device("cpu")
