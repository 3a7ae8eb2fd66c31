"""From a user's call of `step` or `eval_step` to what the executor runs.

What one rank can check by itself is checked first (`check_call`), then the notes of all ranks are
compared (`settle_call`); both happen before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from stretto.errors import InputError
from stretto.ir import Schedule
from stretto.runtime.agreement import require_compatible, require_equal
from stretto.runtime.batch import (
    Rows,
    common_rows,
    count_rows,
    cut_batch,
    listed_lengths,
    split_sizes,
    total_rows,
)
from stretto.runtime.executor import LossFunction, StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """The arguments of one call, on one rank."""

    inputs: Any
    targets: Any
    extras: Mapping[str, Any]
    normaliser: float | None
    num_microbatches: int | None
    return_outputs: bool | None
    return_input_gradients: bool
    loss_scale: float
    loss_index: int
    train: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What this rank has to do with the batch.

    Args:
        rank: This rank.
        schedule: The training schedule.
        loss_fns: The loss functions; empty if the last stage's output is the loss.
    """

    rank: int
    schedule: Schedule
    loss_fns: Sequence[LossFunction]

    @property
    def has_first(self) -> bool:
        """Whether this rank feeds the batch to the first stage."""
        return self.schedule.rank_of(0, 0) == self.rank

    @property
    def loss_rank(self) -> int:
        """The rank that owns the last stage."""
        return self.schedule.rank_of(self.schedule.num_stages - 1, 0)

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.loss_rank == self.rank


def check_call(
    call: StepCall, duties: Duties, *, is_given: bool = True, needs_all: bool = False
) -> Mapping[str, Any]:
    """Check what this rank was given.

    Args:
        call: The arguments.
        duties: What this rank has to do with the batch.
        is_given: Whether this rank was given its part; otherwise another rank sends it.
        needs_all: Whether this rank's batch is that of all ranks.

    Returns:
        A note for the other ranks.

    Raises:
        InputError: something is missing or cannot be cut; nothing was sent yet.
    """
    if is_given:
        _check_needed(call, duties, needs_all)
    count = duties.schedule.num_microbatches if call.train else call.num_microbatches
    if count is not None and count < 1:
        raise InputError(f"num_microbatches is {count}; a step needs at least 1")
    normaliser = call.normaliser
    if normaliser is not None:
        normaliser = _positive("normaliser", normaliser)
    loss_scale = _positive("loss_scale", call.loss_scale)
    if call.loss_index not in range(max(1, len(duties.loss_fns))):
        raise InputError(
            f"loss_index is {call.loss_index}; there are {len(duties.loss_fns)} loss functions"
        )
    given = {"inputs": call.inputs, "targets": call.targets, **call.extras}
    lengths: dict[str, int] = {}
    for name, value in given.items():
        lengths |= listed_lengths(value, name)
    listed = next(iter(lengths.values()), None)
    expected = listed if count is None else count
    for name, length in lengths.items():
        if length != expected:
            raise InputError(
                f"{name} is a list of {length} microbatches, the step has {expected}; a list needs "
                "one entry per microbatch"
            )
    rows = _common_rows(given)
    if count is not None and isinstance(rows, int) and rows < count:
        raise InputError(
            f"the batch has {rows} rows for {count} microbatches; each needs at least one row"
        )
    return {
        "mode": "train" if call.train else "eval",
        "num_microbatches": call.num_microbatches,
        "returns": [call.return_outputs, call.return_input_gradients],
        "loss": [loss_scale, call.loss_index],
        "normaliser": normaliser,
        "has_targets": call.targets is not None,
        "listed": listed,
        "rows": rows,
    }


def _positive(name: str, value: Any) -> float:
    """A finite number above 0, from a Python number or a tensor of one element."""
    is_number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if not is_number or not 0 < float(value) < math.inf:
        raise InputError(f"{name} is {value!r}; it must be a positive finite number")
    return float(value)


def _check_needed(call: StepCall, duties: Duties, needs_all: bool) -> None:
    why = "is the data rank" if needs_all else "owns the first stage"
    if (duties.has_first or needs_all) and call.inputs is None:
        raise InputError(f"inputs are missing: rank {duties.rank} {why} and needs the batch")
    why = "is the data rank" if needs_all else "owns the last stage"
    is_needed = call.train and bool(duties.loss_fns) and (duties.has_last or needs_all)
    if is_needed and call.targets is None:
        raise InputError(
            f"targets are missing: rank {duties.rank} {why} and needs them for the loss"
        )


def _common_rows(given: Mapping[str, Any]) -> Rows | None:
    counted = {name: count_rows(value, name) for name, value in given.items()}
    for name, rows in counted.items():
        if isinstance(rows, tuple) and 0 in rows:
            raise InputError(
                f"{name}: microbatch {rows.index(0)} has no rows; each needs at least 1"
            )
    return common_rows(counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What all ranks agreed on for one step."""

    num_microbatches: int
    sizes: tuple[int, ...] | None
    has_loss: bool
    normaliser: float | None
    loss_scale: float


def settle_call(
    notes: Sequence[Mapping[str, Any]],
    duties: Duties,
    microbatch_rows: int | None,
    *,
    data_rank: int | None = None,
) -> Settled:
    """Compare the notes of all ranks.

    Args:
        notes: From `check_call`, of every rank.
        duties: This rank's duties.
        microbatch_rows: Rows of the largest microbatch of the last training step, if any.
        data_rank: The rank whose batch is that of all ranks, if there is one.

    Raises:
        InputError: the ranks were called differently, or the batch is too small.
    """
    mode = require_equal(notes, "mode", "whether this is a training step or an evaluation")
    require_equal(notes, "num_microbatches", "num_microbatches")
    require_equal(notes, "returns", "what the step returns")
    loss_scale = require_equal(notes, "loss", "loss_scale and loss_index")[0]
    rows = _agreed_rows(notes)
    listed = require_compatible(notes, "listed", "the number of ready-made microbatches")
    if mode == "train":
        count = duties.schedule.num_microbatches
        has_loss = True
    else:
        count = notes[0]["num_microbatches"] or listed
        count = count or _eval_count(rows, microbatch_rows, duties.schedule.num_microbatches)
        giver = duties.loss_rank if data_rank is None else data_rank
        has_loss = bool(notes[giver]["has_targets"] and duties.loss_fns)
    sizes = split_sizes(rows, count) if isinstance(rows, int) else rows
    if sizes is not None and (len(sizes) != count or 0 in sizes):
        raise InputError(
            f"the batch has {sum(sizes)} rows for {count} microbatches; each needs at least one row"
        )
    normaliser = require_compatible(notes, "normaliser", "normaliser")
    return Settled(
        num_microbatches=count,
        sizes=sizes,
        has_loss=has_loss,
        normaliser=normaliser,
        loss_scale=loss_scale,
    )


def _agreed_rows(notes: Sequence[Mapping[str, Any]]) -> Rows | None:
    known = [
        (rank, note["rows"] if isinstance(note["rows"], int) else tuple(note["rows"]))
        for rank, note in enumerate(notes)
        if note["rows"] is not None
    ]
    for rank, rows in known:
        if total_rows(rows) != total_rows(known[0][1]):
            raise InputError(
                f"rank {known[0][0]} was given {total_rows(known[0][1])} rows, rank {rank} "
                f"{total_rows(rows)}; all ranks need the same batch (or None)"
            )
    detailed = {rows for _, rows in known if isinstance(rows, tuple)}
    if len(detailed) > 1:
        raise InputError(f"ready-made microbatches have different sizes on the ranks: {detailed}")
    return next(iter(detailed), known[0][1] if known else None)


def _eval_count(rows: Rows | None, microbatch_rows: int | None, default: int) -> int:
    if rows is None:
        return default
    if isinstance(rows, tuple):
        return len(rows)
    if microbatch_rows is None:
        return max(1, min(default, rows))
    return max(1, -(-rows // microbatch_rows))


def cut_call(call: StepCall, settled: Settled, duties: Duties, number: int) -> StepInput:
    """Cut this rank's values into the agreed microbatches; `number` is that of the step."""
    count, sizes = settled.num_microbatches, settled.sizes
    keep_grad = call.train and call.return_input_gradients
    inputs: list[Any] = []
    if duties.has_first:
        inputs = cut_batch(call.inputs, count, "inputs", sizes=sizes, keep_grad=keep_grad)
    targets: list[Any] = []
    if duties.has_last and settled.has_loss and call.targets is not None:
        targets = cut_batch(call.targets, count, "targets", sizes=sizes)
    columns = {
        name: cut_batch(value, count, name, sizes=sizes) for name, value in call.extras.items()
    }
    keep_outputs = call.return_outputs
    if keep_outputs is None:  # an evaluation without a loss is for its outputs
        keep_outputs = not call.train and not settled.has_loss
    return StepInput(
        number=number,
        sizes=sizes,
        inputs=inputs,
        targets=targets,
        extras=[
            {name: pieces[index] for name, pieces in columns.items()} for index in range(count)
        ],
        divisors=loss_divisors(settled),
        row_divisors=row_divisors(settled),
        loss_scale=settled.loss_scale,
        loss_fns=duties.loss_fns,
        loss_index=call.loss_index,
        has_loss=settled.has_loss,
        keep_outputs=keep_outputs and duties.has_last,
        keep_input_gradients=keep_grad and duties.has_first,
        train=call.train,
    )


def loss_divisors(settled: Settled) -> tuple[float, ...]:
    """What each microbatch's loss is divided by before its backward: the normaliser, if any."""
    if settled.normaliser is not None:
        return (settled.normaliser,) * settled.num_microbatches
    return row_divisors(settled)


def row_divisors(settled: Settled) -> tuple[float, ...]:
    """What a mean over each microbatch's rows is divided by to add up to the batch's.

    N / n_i for a microbatch of n_i of N rows, which is exactly the number of microbatches where
    all are equal.
    """
    if settled.sizes is None:
        return (float(settled.num_microbatches),) * settled.num_microbatches
    total = sum(settled.sizes)
    return tuple(total / size for size in settled.sizes)
