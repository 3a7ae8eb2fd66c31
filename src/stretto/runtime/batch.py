"""Cutting the batch of a step into microbatches, and merging what comes out.

Tensor leaves are cut on dimension 0 by `torch.tensor_split`, so sizes differ by at most one;
everything else goes whole to each microbatch. `along` and `whole` mark what is to be cut on another
dimension or not at all. A list, by itself or as an item of a tuple or dict, is taken as ready-made
microbatches; what is not listed is then cut into the sizes of these. Microbatches are detached: no
gradient flows back into the caller's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    Raises:
        InputError: the dimension is below 0.
    """
    if dim < 0:
        raise InputError(f"along({dim}, ...): the dimension is counted from 0")
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
    return common_rows(dict(_rows_by_part(value, name)))


def common_rows(counted: Mapping[str, Rows | None]) -> Rows | None:
    """The rows that all parts of a batch have; sizes of ready-made microbatches if any has them.

    Args:
        counted: Name of each part, for errors → its rows; None if it has no tensor to count by.

    Raises:
        InputError: two parts have different rows.
    """
    known = {where: rows for where, rows in counted.items() if rows is not None}
    detailed = {where: rows for where, rows in known.items() if isinstance(rows, tuple)}
    for group in (known, detailed):
        first = next(iter(group), None)
        for where, rows in group.items():
            assert first is not None
            _require_same_rows(first, group[first], where, rows)
    return next(iter([*detailed.values(), *known.values()]), None)


def _require_same_rows(first: str, expected: Rows, where: str, rows: Rows) -> None:
    if total_rows(rows) != total_rows(expected):
        raise InputError(
            f"{first} has {total_rows(expected)} rows, {where} has {total_rows(rows)}; they must "
            "be the same (mark what is not cut with stretto.whole)"
        )
    if isinstance(rows, tuple) and isinstance(expected, tuple):
        for index, (one, other) in enumerate(zip(expected, rows, strict=False)):
            if one != other:
                raise InputError(
                    f"{first}: microbatch {index} has {one} rows, {where} has {other} in it; they "
                    "must be the same"
                )


def total_rows(rows: Rows) -> int:
    """Rows of the whole batch."""
    return rows if isinstance(rows, int) else sum(rows)


def listed_lengths(value: Any, name: str) -> dict[str, int]:
    """For each ready-made list in a batch its name and how many microbatches it holds."""
    if isinstance(value, list):
        return {name: len(value)}
    found: dict[str, int] = {}
    for key, part in _parts(value):
        found |= listed_lengths(part, f"{name}[{key!r}]")
    return found


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """What a batch is divided into before it is cut: the items of a plain tuple or dict."""
    if type(value) is tuple:
        return list(enumerate(value))
    return list(value.items()) if type(value) is dict else []


def _rows_by_part(value: Any, name: str) -> list[tuple[str, Rows | None]]:
    if isinstance(value, list):
        sizes = [_rows(one, f"{name}[{index}]") for index, one in enumerate(value)]
        known = tuple(size for size in sizes if size is not None)
        return [(name, known if known and len(known) == len(sizes) else None)]
    if type(value) in (tuple, dict):
        return [
            pair for key, one in _parts(value) for pair in _rows_by_part(one, f"{name}[{key!r}]")
        ]
    return [(name, _rows(value, name, to_cut=True))]


def _rows(value: Any, name: str, *, to_cut: bool = False) -> int | None:
    if isinstance(value, Whole):
        return None
    dim = 0
    if isinstance(value, Along):
        value, dim = value.value, value.dim
    leaves, _ = flatten(value, where=name)
    for leaf in leaves:
        if to_cut and leaf.layout is not torch.strided:
            raise InputError(
                f"{name}: a tensor of layout {leaf.layout} cannot be cut; give a list of "
                "microbatches, or mark it with stretto.whole"
            )
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
    value: Any,
    num_microbatches: int,
    name: str,
    *,
    sizes: Sequence[int] | None = None,
    keep_grad: bool = False,
) -> list[Any]:
    """The microbatches of a batch that was checked before.

    Args:
        value: A nested batch, or a list with one entry per microbatch.
        num_microbatches: How many to make, at least 1.
        name: What the batch is called in errors.
        sizes: Rows of each microbatch; by default they differ by at most one.
        keep_grad: Whether the pieces of a tensor that requires a gradient require one, too.
    """
    count = num_microbatches
    if isinstance(value, list):
        return [_detached(one, f"{name}[{i}]", keep_grad) for i, one in enumerate(value)]
    if type(value) in (tuple, dict):
        cuts = {
            key: cut_batch(one, count, f"{name}[{key!r}]", sizes=sizes, keep_grad=keep_grad)
            for key, one in _parts(value)
        }
        pieces = [{key: cut[index] for key, cut in cuts.items()} for index in range(count)]
        return [tuple(piece.values()) for piece in pieces] if type(value) is tuple else pieces
    if isinstance(value, Whole):
        return [_detached(value, name, keep_grad) for _ in range(count)]
    dim = value.dim if isinstance(value, Along) else 0
    leaves, spec = flatten(_unmarked(value), where=name)
    columns = [_cut_leaf(leaf, count, sizes, dim, keep_grad) for leaf in leaves]
    return [unflatten(spec, [column[index] for column in columns]) for index in range(count)]


def _cut_leaf(
    leaf: torch.Tensor, count: int, sizes: Sequence[int] | None, dim: int, keep_grad: bool
) -> list[torch.Tensor]:
    if leaf.ndim == 0:
        return [_fresh(leaf, keep_grad) for _ in range(count)]
    plain = leaf.detach()
    cuts = plain.tensor_split(count, dim) if sizes is None else plain.split(list(sizes), dim)
    # `data`: a stage may change its piece in place, which is no change of the other pieces
    return [cut.data.requires_grad_(keep_grad and leaf.requires_grad) for cut in cuts]


def _fresh(leaf: torch.Tensor, keep_grad: bool) -> torch.Tensor:
    return leaf.detach().requires_grad_(keep_grad and leaf.requires_grad)


def _detached(value: Any, name: str, keep_grad: bool) -> Any:
    is_whole = isinstance(value, Whole)
    leaves, spec = flatten(_unmarked(value), where=name, keep_objects=is_whole)
    return unflatten(spec, [_fresh(leaf, keep_grad) for leaf in leaves])


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
    inputs: Any,
    gradients: Mapping[int, Sequence[torch.Tensor | None]],
    sizes: Sequence[int] | None,
) -> Any:
    """Gradients in the structure of the step's inputs: None for what has none.

    Args:
        inputs: The inputs as given to the step.
        gradients: Microbatch → a gradient (or None) per tensor of its piece.
        sizes: Rows of each microbatch, if there are rows.
    """
    columns = [iter(gradients[index]) for index in sorted(gradients)]
    return _merge_gradients(inputs, columns, sizes)


def _merge_gradients(
    value: Any, columns: Sequence[Iterator[torch.Tensor | None]], sizes: Sequence[int] | None
) -> Any:
    """Take from each microbatch's gradients, in order, those of one part of the inputs."""
    if isinstance(value, list):
        return [
            _merge_gradients(Whole(_unmarked(one)), [column], None)
            for one, column in zip(value, columns, strict=True)
        ]
    if type(value) in (tuple, dict):
        merged = {key: _merge_gradients(one, columns, sizes) for key, one in _parts(value)}
        return tuple(merged.values()) if type(value) is tuple else merged
    is_whole = isinstance(value, Whole)
    leaves, spec = flatten(_unmarked(value), keep_objects=is_whole)
    parts = [(leaf, [next(column) for column in columns]) for leaf in leaves]
    if is_whole:
        return unflatten(spec, [_add_up(leaf, each) for leaf, each in parts])
    dim = value.dim if isinstance(value, Along) else 0
    return unflatten(spec, [_join(leaf, each, dim, sizes) for leaf, each in parts])


def _add_up(leaf: torch.Tensor, each: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The gradient of what every microbatch got, added ascending as plain autograd does."""
    total: torch.Tensor | None = None
    for gradient in each:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total if leaf.requires_grad else None


def _join(
    leaf: torch.Tensor,
    each: Sequence[torch.Tensor | None],
    dim: int,
    sizes: Sequence[int] | None,
) -> torch.Tensor | None:
    """The gradient of what was cut, zero where a microbatch has none."""
    if leaf.ndim == 0:
        return _add_up(leaf, each)
    if not leaf.requires_grad or all(one is None for one in each):
        return None
    assert sizes is not None, "what has rows was counted"
    parts = [
        torch.zeros_like(leaf.detach().narrow(dim, 0, size)) if one is None else one
        for one, size in zip(each, sizes, strict=True)
    ]
    return torch.cat(parts, dim)


def _unmarked(value: Any) -> Any:
    return value.value if isinstance(value, Whole | Along) else value
