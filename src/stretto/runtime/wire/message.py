"""What travels between two stages, and how it becomes bytes.

A message is a nested value: tensors plus a spec. Its `Layout` (structure, and dtype, shape,
strides and need of gradient per tensor) travels only when it differs from the last one on the
same edge; both ends remember it. Tensors keep their exact strides, since kernels may give other
bits for other strides: dense ones are copied in memory order, others packed and spread again. They
keep their place within a vector register's width, too: matrix products of some libraries give other
bits at addresses that are not multiples of 16, as those of a slice may be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stretto.errors import InputError, TransportError
from stretto.runtime.tree import Spec, spec_from_json, spec_to_json

ALIGNMENT = 64
"""Every tensor of a frame starts at a multiple of this many bytes."""


class TensorLayout(NamedTuple):
    """How one tensor lies in memory and whether a gradient comes back for it.

    `shift` is its address modulo ALIGNMENT, in bytes; 0 for dtypes that no vector kernel computes
    with, so that slices of masks and indices do not count as changed.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    shift: int


class Layout(NamedTuple):
    """Structure of a message: everything but the tensors' bytes. Hashable."""

    spec: Spec
    tensors: tuple[TensorLayout, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors detached from any graph, and the layout to build the value again.

    Args:
        layout: Structure, and how each tensor lies in memory.
        tensors: The tensors; until they are sent they share memory with the sender's.
        what: What the message holds, for errors.
        versions: How often each tensor had been changed in place when the message was made.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    what: str = "a message"
    versions: tuple[int, ...] = ()

    def check_unchanged(self) -> None:
        """Refuse a message whose tensors were changed in place after it was made.

        Raises:
            InputError: one was; what was meant is lost.
        """
        for tensor, version in zip(self.tensors, self.versions, strict=False):
            if not tensor.is_inference() and tensor._version != version:
                raise InputError(
                    f"{self.what} was changed in place after it was returned and before it was "
                    "used; return a fresh tensor"
                )


def make_message(
    tensors: Sequence[torch.Tensor],
    spec: Spec,
    requires_grad: Sequence[bool],
    *,
    what: str = "a message",
) -> Message:
    """Wrap flattened tensors; they are detached, and copied only where elements share memory.

    Raises:
        InputError: a tensor is sparse, quantised or has no data.
    """
    plain = tuple(_plain(tensor.detach()) for tensor in tensors)
    layouts = tuple(
        layout_of(tensor, flag) for tensor, flag in zip(plain, requires_grad, strict=True)
    )
    versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in plain)
    return Message(Layout(spec, layouts), plain, what, versions)


def layout_of(tensor: torch.Tensor, requires_grad: bool) -> TensorLayout:
    """How a tensor lies in memory."""
    shift = 0
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        shift = tensor.data_ptr() % ALIGNMENT
    if shift % tensor.element_size():
        shift = 0
    return TensorLayout(
        tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), requires_grad, shift
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise InputError(
            f"a tensor between stages is {tensor.layout} on {tensor.device} with dtype "
            f"{tensor.dtype}; only dense tensors with data can travel"
        )
    # windows over shared elements (unfold) cannot be filled one by one: they travel contiguous
    return tensor.contiguous() if _shares_elements(tensor) else tensor


def encode_layout(layout: Layout) -> bytes:
    """The layout as bytes (JSON)."""
    tensors = [
        [
            str(one.dtype).removeprefix("torch."),
            one.shape,
            one.strides,
            one.requires_grad,
            one.shift,
        ]
        for one in layout.tensors
    ]
    return json.dumps([spec_to_json(layout.spec), tensors]).encode()


def decode_layout(data: bytes) -> Layout:
    """Read bytes written by `encode_layout`; foreign bytes raise, they never run."""
    try:
        spec, tensors = json.loads(data)
        layouts = tuple(
            TensorLayout(_dtype(name), tuple(shape), tuple(strides), bool(flag), int(shift))
            for name, shape, strides, flag, shift in tensors
        )
        return Layout(spec_from_json(spec), layouts)
    except (ValueError, TypeError) as error:
        raise TransportError(f"the bytes of a message layout make no sense: {error}") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def payload_bytes(layout: Layout) -> int:
    """Bytes the tensors of a message take in a frame."""
    return sum(_room(one) for one in layout.tensors)


def pack(message: Message, frame: torch.Tensor, offset: int) -> None:
    """Copy the tensors into a byte tensor from `offset` on (a multiple of ALIGNMENT)."""
    for tensor, layout in zip(message.tensors, message.layout.tensors, strict=True):
        _slot(frame, offset, layout).copy_(_collapse(tensor))
        offset += _room(layout)


def unpack(layout: Layout, frame: torch.Tensor, offset: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a frame, without a copy where they are dense in memory.

    Each is a tensor of its own over the frame's bytes (not a view of another tensor), so that
    changing one in place never marks another as changed.
    """
    tensors: list[torch.Tensor] = []
    for one in layout.tensors:
        slot = _slot(frame, offset, one)
        is_whole = slot.shape == one.shape and slot.stride() == one.strides
        tensors.append(slot if is_whole else _spread(slot, one))
        offset += _room(one)
    return tuple(tensors)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh copy with exactly the same strides (expanded dimensions stay expanded)."""
    return _spread(_collapse(tensor), layout_of(tensor, requires_grad=False))


def _room(layout: TensorLayout) -> int:
    """Bytes of a frame that a tensor takes, with its shift, up to the next multiple."""
    return -(-(layout.shift + _packed_bytes(layout)) // ALIGNMENT) * ALIGNMENT


def _collapsed_shape(layout: TensorLayout) -> tuple[int, ...]:
    return tuple(
        1 if stride == 0 and size > 0 else size
        for size, stride in zip(layout.shape, layout.strides, strict=True)
    )


def _packed_bytes(layout: TensorLayout) -> int:
    count = layout.dtype.itemsize
    for size in _collapsed_shape(layout):
        count *= size
    return count


def _collapse(tensor: torch.Tensor) -> torch.Tensor:
    """One element along every expanded dimension: what has to be copied."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _slot(frame: torch.Tensor, offset: int, layout: TensorLayout) -> torch.Tensor:
    """A tensor over the frame's bytes: in the layout's own strides if these are dense."""
    shape = _collapsed_shape(layout)
    strides = layout.strides if _is_dense(layout) else _contiguous_strides(shape)
    start = (offset + layout.shift) // layout.dtype.itemsize
    empty = torch.empty(0, dtype=layout.dtype)
    return empty.set_(frame.untyped_storage(), start, shape, strides)


def _spread(packed: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    reach = 1 + sum(
        stride * (size - 1) for stride, size in zip(layout.strides, layout.shape, strict=True)
    )
    shift = layout.shift // layout.dtype.itemsize
    memory = torch.empty(shift + max(reach, 0), dtype=layout.dtype)
    fresh = torch.empty(0, dtype=layout.dtype)
    fresh.set_(memory.untyped_storage(), shift, layout.shape, layout.strides)
    _collapse(fresh).copy_(packed)
    return fresh


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Whether elements overlap in memory, apart from whole expanded dimensions."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _is_dense(layout: TensorLayout) -> bool:
    """Whether the strides are those of a permuted contiguous tensor."""
    expected = 1
    sizes = zip(layout.strides, layout.shape, strict=True)
    if 0 in layout.shape:
        return True
    for stride, size in sorted(pair for pair in sizes if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
