"""Cutting the batch of a step into microbatches, and merging what comes out.

Tensor leaves are cut on dimension 0 by `torch.tensor_split`, so sizes differ by at most one;
everything else goes whole to each microbatch. `along` and `whole` mark what is to be cut on another
dimension or not at all. A list, by itself or as an item of a tuple or dict, is taken as ready-made
microbatches. Microbatches are detached: no gradient flows back into the caller's graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stretto.errors import InputError
from stretto.runtime.tree import flatten, unflatten

Rows = int | tuple[int, ...]
"""Rows of a whole batch, or of each ready-made microbatch."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that goes to every microbatch as it is; made by `whole`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Along:
    """A value whose tensors are cut on a dimension of their own; made by `along`."""

    value: Any
    dim: int


def whole(value: Any) -> Whole:
    """Mark a value that every microbatch gets as it is: a table, a mask for all rows, an object."""
    return Whole(value)


def along(dim: int, value: Any) -> Along:
    """Mark a value whose rows lie in another dimension, as in (length, rows, width).

    Args:
        dim: The dimension, from 0.
        value: A nested value; all its tensors are cut there.
    """
    return Along(value, dim)


def count_rows(value: Any, name: str) -> Rows | None:
    """How many rows a batch has, or each of its ready-made microbatches.

    Args:
        value: The batch: a nested value, or a list of microbatches.
        name: What the batch is called in errors.

    Returns:
        None if there is no tensor to count by.

    Raises:
        InputError: tensors of one batch have different numbers of rows.
    """
    known = {where: rows for where, rows in _rows_by_part(value, name) if rows is not None}
    first = next(iter(known.items()), None)
    if first is None:
        return None
    for where, rows in known.items():
        if total_rows(rows) != total_rows(first[1]):
            raise InputError(
                f"{first[0]} has {total_rows(first[1])} rows, {where} has {total_rows(rows)}; they "
                "must be the same"
            )
    # sizes of ready-made microbatches say more than the size of the whole
    return next((rows for rows in known.values() if isinstance(rows, tuple)), first[1])


def total_rows(rows: Rows) -> int:
    """Rows of the whole batch."""
    return rows if isinstance(rows, int) else sum(rows)


def listed_length(value: Any) -> int | None:
    """The number of ready-made microbatches in a batch, if it has any."""
    if isinstance(value, list):
        return len(value)
    parts = value.values() if type(value) is dict else value if type(value) is tuple else ()
    return next((len(part) for part in parts if isinstance(part, list)), None)


def _rows_by_part(value: Any, name: str) -> list[tuple[str, Rows | None]]:
    if isinstance(value, list):
        sizes = [_rows(one, f"{name}[{index}]") for index, one in enumerate(value)]
        known = tuple(size for size in sizes if size is not None)
        return [(name, known if known and len(known) == len(sizes) else None)]
    if type(value) is tuple:
        return [pair for i, one in enumerate(value) for pair in _rows_by_part(one, f"{name}[{i}]")]
    if type(value) is dict:
        return [pair for k, one in value.items() for pair in _rows_by_part(one, f"{name}[{k!r}]")]
    return [(name, _rows(value, name))]


def _rows(value: Any, name: str) -> int | None:
    if isinstance(value, Whole):
        return None
    dim = 0
    if isinstance(value, Along):
        value, dim = value.value, value.dim
    leaves, _ = flatten(value, where=name)
    for leaf in leaves:
        if dim and leaf.ndim <= dim:
            raise InputError(
                f"{name}: a tensor of shape {tuple(leaf.shape)} has no dimension {dim}"
            )
    sizes = sorted({leaf.shape[dim] for leaf in leaves if leaf.ndim > 0})
    if len(sizes) > 1:
        raise InputError(
            f"{name}: its tensors have {sizes} rows in dimension {dim}; all need the same number"
        )
    return sizes[0] if sizes else None


def cut_batch(
    value: Any, num_microbatches: int, name: str, *, keep_grad: bool = False
) -> list[Any]:
    """The microbatches of a batch.

    Args:
        value: A nested batch, or a list with one entry per microbatch.
        num_microbatches: How many to make, at least 1.
        name: What the batch is called in errors.
        keep_grad: Whether the pieces of a tensor that requires a gradient require one, too.

    Raises:
        InputError: fewer rows than microbatches, or a list of another length.
    """
    count = num_microbatches
    if isinstance(value, list):
        if len(value) != count:
            raise InputError(
                f"{name} is a list of {len(value)} microbatches, the step has {count}; a list "
                "needs one entry per microbatch"
            )
        return [_detached(one, f"{name}[{i}]", keep_grad) for i, one in enumerate(value)]
    if type(value) is tuple:
        parts = [
            cut_batch(one, count, f"{name}[{i}]", keep_grad=keep_grad)
            for i, one in enumerate(value)
        ]
        return [tuple(part[index] for part in parts) for index in range(count)]
    if type(value) is dict:
        cuts = {
            key: cut_batch(one, count, f"{name}[{key!r}]", keep_grad=keep_grad)
            for key, one in value.items()
        }
        return [{key: part[index] for key, part in cuts.items()} for index in range(count)]
    return _cut_value(value, count, name, keep_grad)


def _cut_value(value: Any, count: int, name: str, keep_grad: bool) -> list[Any]:
    if isinstance(value, Whole):
        return [value.value] * count
    rows = _rows(value, name)
    if rows is not None and rows < count:
        raise InputError(
            f"{name} has {rows} rows for {count} microbatches; each microbatch needs at least one "
            "row"
        )
    dim = 0
    if isinstance(value, Along):
        value, dim = value.value, value.dim
    leaves, spec = flatten(value, where=name)
    pieces = [_cut_leaf(leaf, count, dim, keep_grad) for leaf in leaves]
    return [unflatten(spec, [cuts[index] for cuts in pieces]) for index in range(count)]


def _cut_leaf(leaf: torch.Tensor, count: int, dim: int, keep_grad: bool) -> list[torch.Tensor]:
    plain = leaf.detach()
    pieces = list(torch.tensor_split(plain, count, dim)) if leaf.ndim > 0 else [plain] * count
    if keep_grad and leaf.requires_grad:
        pieces = [piece.detach().requires_grad_() for piece in pieces]
    return pieces


def _detached(value: Any, name: str, keep_grad: bool) -> Any:
    if isinstance(value, Whole):
        return value.value
    leaves, spec = flatten(value, where=name)
    fresh = [leaf.detach().requires_grad_(keep_grad and leaf.requires_grad) for leaf in leaves]
    return unflatten(spec, fresh)


def split_sizes(rows: int, num_microbatches: int) -> tuple[int, ...]:
    """The rows of each microbatch as `torch.tensor_split` deals them: larger ones first."""
    quotient, remainder = divmod(rows, num_microbatches)
    return (quotient + 1,) * remainder + (quotient,) * (num_microbatches - remainder)


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """One value from the outputs of all microbatches.

    Tensors are concatenated on dimension 0; tensors without dimensions become a list with one
    entry per microbatch. The structure is that of every microbatch.

    Raises:
        InputError: the outputs differ in structure.
    """
    flat = [flatten(value, where=f"outputs[{index}]") for index, value in enumerate(outputs)]
    if len({spec for _, spec in flat}) != 1:
        raise InputError(
            "the outputs of the microbatches differ in structure or in plain values, so they "
            "cannot be merged; ask for them one by one"
        )
    merged = [_merge(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return unflatten(flat[0][1], merged)


def _merge(column: tuple[torch.Tensor, ...]) -> Any:
    return torch.cat(column) if all(one.ndim > 0 for one in column) else list(column)


def merge_input_gradients(
    inputs: Any, gradients: Mapping[int, Sequence[torch.Tensor | None]]
) -> Any:
    """Gradients in the structure of the step's inputs: None for what has none.

    Args:
        inputs: The inputs as given to the step.
        gradients: Microbatch → a gradient (or None) per tensor of its piece.
    """
    if isinstance(inputs, list):
        return [
            unflatten(flatten(_unmarked(one))[1], gradients[index])
            for index, one in enumerate(inputs)
        ]
    leaves, spec = flatten(_unmarked(inputs))
    dims = _dims(inputs)
    merged: list[torch.Tensor | None] = []
    for position, leaf in enumerate(leaves):
        column = [gradients[index][position] for index in sorted(gradients)]
        known = [one for one in column if one is not None]
        if not leaf.requires_grad or not known:
            merged.append(None)
        elif leaf.ndim == 0:
            merged.append(torch.stack(known).sum(0))
        else:
            sizes = split_sizes(leaf.shape[dims[position]], len(column))
            parts = [
                _zeros_like_piece(leaf, dims[position], size) if one is None else one
                for one, size in zip(column, sizes, strict=True)
            ]
            merged.append(torch.cat(parts, dims[position]))
    return unflatten(spec, merged)


def _zeros_like_piece(leaf: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return torch.zeros_like(leaf.detach().narrow(dim, 0, size))


def _unmarked(value: Any) -> Any:
    if isinstance(value, Whole | Along):
        return value.value
    if type(value) is tuple:
        return tuple(_unmarked(one) for one in value)
    if type(value) is dict:
        return {key: _unmarked(one) for key, one in value.items()}
    return value


def _dims(value: Any) -> list[int]:
    """The dimension each tensor of a batch is cut on, in the order of its tensors."""
    if isinstance(value, Along):
        return [value.dim] * len(flatten(value.value)[0])
    if type(value) in (tuple, dict):
        parts = value.values() if isinstance(value, dict) else value
        return [dim for one in parts for dim in _dims(one)]
    return [0] * len(flatten(_unmarked(value))[0])
