"""From a user's call of `step` or `eval_step` to what the executor runs.

What one rank can check by itself is checked first (`check_call`), then the notes of all ranks are
compared (`settle_call`); both happen before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import InputError
from stretto.ir import Schedule
from stretto.runtime.agreement import require_compatible, require_equal
from stretto.runtime.batch import count_rows, cut_batch, split_sizes
from stretto.runtime.executor import StepInput

Rows = int | tuple[int, ...]
"""Rows of a whole batch, or of each ready-made microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """The arguments of one call, on one rank."""

    inputs: Any
    targets: Any
    extras: Mapping[str, Any]
    normaliser: float | None
    num_microbatches: int | None
    return_outputs: bool
    train: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What this rank has to do with the batch.

    Args:
        rank: This rank.
        schedule: The training schedule.
        loss_fn: The loss function, or None.
    """

    rank: int
    schedule: Schedule
    loss_fn: Callable[..., Any] | None

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


def check_call(call: StepCall, duties: Duties) -> Mapping[str, Any]:
    """Check what this rank was given.

    Returns:
        A note for the other ranks.

    Raises:
        InputError: something is missing or cannot be cut; nothing was sent yet.
    """
    _check_needed(call, duties)
    count = duties.schedule.num_microbatches if call.train else call.num_microbatches
    if count is not None and count < 1:
        raise InputError(f"num_microbatches is {count}; a step needs at least 1")
    if call.normaliser is not None and not call.normaliser > 0:
        raise InputError(f"normaliser is {call.normaliser}; it must be a positive number")
    given = {"inputs": call.inputs, "targets": call.targets, **call.extras}
    lengths = {name: len(value) for name, value in given.items() if isinstance(value, list)}
    for name, length in lengths.items():
        if count is not None and length != count:
            raise InputError(
                f"{name} is a list of {length} microbatches, the step has {count}; a list needs "
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
        "return_outputs": call.return_outputs,
        "normaliser": call.normaliser,
        "has_targets": call.targets is not None,
        "listed": next(iter(lengths.values()), None),
        "rows": rows,
    }


def _check_needed(call: StepCall, duties: Duties) -> None:
    if duties.has_first and call.inputs is None:
        raise InputError(
            f"inputs are missing: rank {duties.rank} owns the first stage and needs the batch"
        )
    if call.train and duties.has_last and duties.loss_fn is not None and call.targets is None:
        raise InputError(
            f"targets are missing: rank {duties.rank} owns the last stage and needs them for the "
            "loss"
        )


def _common_rows(given: Mapping[str, Any]) -> Rows | None:
    known = {name: count_rows(value, name) for name, value in given.items()}
    known = {name: rows for name, rows in known.items() if rows is not None}
    for name, rows in known.items():
        if isinstance(rows, tuple) and 0 in rows:
            raise InputError(
                f"{name}: microbatch {rows.index(0)} has no rows; each needs at least 1"
            )
    first = next(iter(known.items()), None)
    if first is None:
        return None
    for name, rows in known.items():
        if _total(rows) != _total(first[1]):
            raise InputError(
                f"{first[0]} has {_total(first[1])} rows, {name} has {_total(rows)}; they must be "
                "the same"
            )
    # sizes of ready-made microbatches say more than the size of the whole
    return next((rows for rows in known.values() if isinstance(rows, tuple)), first[1])


def _total(rows: Rows) -> int:
    return rows if isinstance(rows, int) else sum(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What all ranks agreed on for one step."""

    num_microbatches: int
    sizes: tuple[int, ...] | None
    has_loss: bool
    normaliser: float | None


def settle_call(
    notes: Sequence[Mapping[str, Any]], duties: Duties, microbatch_rows: int | None
) -> Settled:
    """Compare the notes of all ranks.

    Args:
        notes: From `check_call`, of every rank.
        duties: This rank's duties.
        microbatch_rows: Rows of the largest microbatch of the last training step, if any.

    Raises:
        InputError: the ranks were called differently, or the batch is too small.
    """
    mode = require_equal(notes, "mode", "whether this is a training step or an evaluation")
    require_equal(notes, "num_microbatches", "num_microbatches")
    require_equal(notes, "return_outputs", "return_outputs")
    rows = _agreed_rows(notes)
    listed = require_compatible(notes, "listed", "the number of ready-made microbatches")
    if mode == "train":
        count = duties.schedule.num_microbatches
        has_loss = True
    else:
        count = notes[0]["num_microbatches"] or listed
        count = count or _eval_count(rows, microbatch_rows, duties.schedule.num_microbatches)
        has_loss = notes[duties.loss_rank]["has_targets"] and duties.loss_fn is not None
    sizes = split_sizes(rows, count) if isinstance(rows, int) else rows
    if sizes is not None and (len(sizes) != count or 0 in sizes):
        raise InputError(
            f"the batch has {sum(sizes)} rows for {count} microbatches; each needs at least one row"
        )
    normaliser = require_compatible(notes, "normaliser", "normaliser")
    return Settled(num_microbatches=count, sizes=sizes, has_loss=has_loss, normaliser=normaliser)


def _agreed_rows(notes: Sequence[Mapping[str, Any]]) -> Rows | None:
    known = [
        (rank, note["rows"] if isinstance(note["rows"], int) else tuple(note["rows"]))
        for rank, note in enumerate(notes)
        if note["rows"] is not None
    ]
    for rank, rows in known:
        if _total(rows) != _total(known[0][1]):
            raise InputError(
                f"rank {known[0][0]} was given {_total(known[0][1])} rows, rank {rank} "
                f"{_total(rows)}; all ranks need the same batch (or None)"
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


def cut_call(call: StepCall, settled: Settled, duties: Duties) -> StepInput:
    """Cut this rank's values into the agreed microbatches."""
    count = settled.num_microbatches
    inputs = cut_batch(call.inputs, count, "inputs") if duties.has_first else []
    targets: list[Any] = []
    if duties.has_last and settled.has_loss and call.targets is not None:
        targets = cut_batch(call.targets, count, "targets")
    columns = {name: cut_batch(value, count, name) for name, value in call.extras.items()}
    return StepInput(
        inputs=inputs,
        targets=targets,
        extras=[
            {name: pieces[index] for name, pieces in columns.items()} for index in range(count)
        ],
        divisors=loss_divisors(settled),
        loss_fn=duties.loss_fn,
        has_loss=settled.has_loss,
        keep_outputs=call.return_outputs and duties.has_last,
        train=call.train,
    )


def loss_divisors(settled: Settled) -> tuple[float, ...]:
    """What each microbatch's loss is divided by before its backward.

    The normaliser, if there is one. Otherwise N / n_i for a microbatch of n_i of N rows, which is
    exactly the number of microbatches where all are equal.
    """
    count = settled.num_microbatches
    if settled.normaliser is not None:
        return (settled.normaliser,) * count
    if settled.sizes is None:
        return (float(count),) * count
    total = sum(settled.sizes)
    return tuple(total / size for size in settled.sizes)
