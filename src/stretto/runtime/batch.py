"""Cutting the batch of a step into microbatches, and merging what comes out.

Tensor leaves are cut on dimension 0 by `torch.tensor_split`, so sizes differ by at most one;
everything else goes whole to each microbatch. A list is taken as ready-made microbatches.
Microbatches are detached: no gradient flows back into the caller's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stretto.errors import InputError
from stretto.runtime.tree import flatten, unflatten


def count_rows(value: object, name: str) -> int | tuple[int, ...] | None:
    """How many rows a batch has, or each of its ready-made microbatches.

    Args:
        value: The batch, a list of microbatches, or None.
        name: What the batch is called in errors.

    Returns:
        None if there is no tensor to count by.

    Raises:
        InputError: tensors of one batch have different numbers of rows.
    """
    if isinstance(value, list):
        sizes = [_rows(one, f"{name}[{index}]") for index, one in enumerate(value)]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) and known else None
    return _rows(value, name)


def _rows(value: object, name: str) -> int | None:
    leaves, _ = flatten(value, where=name)
    sizes = sorted({leaf.shape[0] for leaf in leaves if leaf.ndim > 0})
    if len(sizes) > 1:
        raise InputError(
            f"{name}: its tensors have {sizes} rows in dimension 0; all need the same number"
        )
    return sizes[0] if sizes else None


def cut_batch(value: object, num_microbatches: int, name: str) -> list[Any]:
    """The microbatches of a batch.

    Args:
        value: A nested batch, or a list with one entry per microbatch.
        num_microbatches: How many to make, at least 1.
        name: What the batch is called in errors.

    Raises:
        InputError: fewer rows than microbatches, or a list of another length.
    """
    if isinstance(value, list):
        if len(value) != num_microbatches:
            raise InputError(
                f"{name} is a list of {len(value)} microbatches, the step has {num_microbatches}; "
                "a list needs one entry per microbatch (wrap it in a tuple to pass a list as one "
                "value)"
            )
        return [_detached(one, f"{name}[{index}]") for index, one in enumerate(value)]
    rows = _rows(value, name)
    if rows is not None and rows < num_microbatches:
        raise InputError(
            f"{name} has {rows} rows for {num_microbatches} microbatches; each microbatch needs at "
            "least one row"
        )
    leaves, spec = flatten(value, where=name)
    pieces = [_cut_leaf(leaf, num_microbatches) for leaf in leaves]
    return [unflatten(spec, [cuts[index] for cuts in pieces]) for index in range(num_microbatches)]


def _cut_leaf(leaf: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    leaf = leaf.detach()
    return torch.tensor_split(leaf, count) if leaf.ndim > 0 else [leaf] * count


def _detached(value: object, name: str) -> Any:
    leaves, spec = flatten(value, where=name)
    return unflatten(spec, [leaf.detach() for leaf in leaves])


def split_sizes(rows: int, num_microbatches: int) -> tuple[int, ...]:
    """The rows of each microbatch as `torch.tensor_split` deals them: larger ones first."""
    quotient, remainder = divmod(rows, num_microbatches)
    return (quotient + 1,) * remainder + (quotient,) * (num_microbatches - remainder)


def merge_outputs(outputs: Sequence[object]) -> Any:
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
