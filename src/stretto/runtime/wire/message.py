"""What travels between two stages, and how it becomes bytes.

A message is a nested value: tensors plus a spec. Its `Layout` (structure, and dtype, shape,
strides and need of gradient per tensor) travels only when it differs from the last one on the
same edge; both ends remember it. Tensors keep their exact strides, since kernels may give other
bits for other strides: dense ones are copied in memory order, others packed and spread again, and
windows over shared elements travel as the memory they look at. They keep their place within a
vector register's width, too: matrix products of some libraries give other bits at addresses that
are not multiples of 16, as those of a slice may be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from stretto.errors import InputError, TransportError
from stretto.runtime.tree import Spec, spec_from_json, spec_to_json, tensor_paths

ALIGNMENT = 64
"""Every tensor of a frame starts at a multiple of this many bytes."""


class TensorLayout(NamedTuple):
    """How one tensor lies in memory and whether a gradient comes back for it.

    `shift` is its address modulo ALIGNMENT, in bytes; 0 for dtypes that no vector kernel computes
    with, so that slices of masks and indices do not count as changed. `is_shared`: what its sender
    says of it; its receiver then must not change it in place.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    shift: int
    is_shared: bool = False


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
        for index, (tensor, version) in enumerate(zip(self.tensors, self.versions, strict=False)):
            if not tensor.is_inference() and tensor._version != version:
                path = _path(self.layout.spec, self.what, index)
                raise InputError(
                    f"{path} was changed in place after it was returned and before it was used; "
                    "return a fresh tensor"
                )


def make_message(
    tensors: Sequence[torch.Tensor],
    spec: Spec,
    requires_grad: Sequence[bool],
    *,
    what: str = "a message",
    is_shared: Sequence[bool] = (),
) -> Message:
    """Wrap flattened tensors; they are detached, and not copied.

    Raises:
        InputError: a tensor is sparse, quantised, of a class of its own, or has no data.
    """
    for index, tensor in enumerate(tensors):
        reason = _unfit(tensor)
        if reason is not None:
            raise InputError(
                f"{_path(spec, what, index)} is {reason}, which cannot travel between stages; only "
                "plain dense tensors with data can"
            )
    plain = tuple(tensor.detach() for tensor in tensors)
    shared = is_shared or [False] * len(plain)
    layouts = tuple(
        layout_of(tensor, flag, one)
        for tensor, flag, one in zip(plain, requires_grad, shared, strict=True)
    )
    versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in plain)
    return Message(Layout(spec, layouts), plain, what, versions)


def layout_of(tensor: torch.Tensor, requires_grad: bool, is_shared: bool = False) -> TensorLayout:
    """How a tensor lies in memory."""
    shift = 0
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        shift = tensor.data_ptr() % ALIGNMENT
    if shift % tensor.element_size():
        shift = 0
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return TensorLayout(tensor.dtype, shape, strides, requires_grad, shift, is_shared)


_CLASSES = (torch.Tensor, torch.nn.Parameter)

_UNCOPIED = {getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8)}
"""Dtypes of less than a byte, which torch cannot copy."""


def _unfit(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot travel, if so."""
    kind = type(tensor)
    if kind not in _CLASSES:
        return f"a {kind.__module__}.{kind.__qualname__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "a tensor without data"
    if tensor.is_quantized or tensor.dtype in _UNCOPIED:
        return f"a tensor of dtype {tensor.dtype}"
    return None


def _path(spec: Spec, what: str, index: int) -> str:
    return next(islice(tensor_paths(spec, what), index, None), what)


def encode_layout(layout: Layout) -> bytes:
    """The layout as bytes (JSON)."""
    tensors = [
        [
            str(one.dtype).removeprefix("torch."),
            one.shape,
            one.strides,
            one.requires_grad,
            one.shift,
            one.is_shared,
        ]
        for one in layout.tensors
    ]
    return json.dumps([spec_to_json(layout.spec), tensors]).encode()


def decode_layout(data: bytes) -> Layout:
    """Read bytes written by `encode_layout`; foreign bytes raise, they never run."""
    try:
        spec, tensors = json.loads(data)
        layouts = tuple(
            TensorLayout(
                _dtype(name), tuple(shape), tuple(strides), bool(flag), int(shift), bool(is_shared)
            )
            for name, shape, strides, flag, shift, is_shared in tensors
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
        _slot(frame, offset, layout).copy_(_packed(tensor, layout))
        offset += _room(layout)


def unpack(layout: Layout, frame: torch.Tensor, offset: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a frame, without a copy where they are dense in memory.

    Each is a tensor of its own over a part of the frame's bytes (not a view of another tensor), so
    that changing one in place never marks another as changed; and its storage begins and ends where
    it does, for `as_strided`, and for saving it.
    """
    tensors: list[torch.Tensor] = []
    for one in layout.tensors:
        slot = _slot(frame, offset, one)
        if not _is_dense(one):
            slot = _windows(slot, one) if _shares_elements(one) else _spread(slot, one)
        tensors.append(slot)
        offset += _room(one)
    return tuple(tensors)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh copy with exactly the same strides (expanded dimensions stay expanded)."""
    layout = layout_of(tensor, requires_grad=False)
    return _spread(_packed(tensor, layout), layout)


def _room(layout: TensorLayout) -> int:
    """Bytes of a frame that a tensor takes, with its shift, up to the next multiple."""
    return -(-(layout.shift + _packed_bytes(layout)) // ALIGNMENT) * ALIGNMENT


def _packed_shape(layout: TensorLayout) -> tuple[int, ...]:
    """The shape of what is copied: the tensor, one of its repetitions, or its span of memory."""
    if _is_dense(layout):
        return layout.shape
    if _shares_elements(layout):
        return (_reach(layout),)
    return tuple(
        1 if stride == 0 else size
        for size, stride in zip(layout.shape, layout.strides, strict=True)
    )


def _packed_bytes(layout: TensorLayout) -> int:
    return layout.dtype.itemsize * math.prod(_packed_shape(layout))


def _packed(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """What has to be copied of a tensor of this layout: see `_packed_shape`."""
    if _is_dense(layout):
        return tensor
    if _shares_elements(layout):
        return tensor.as_strided((_reach(layout),), (1,))
    for dim, stride in enumerate(layout.strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _slot(frame: torch.Tensor, offset: int, layout: TensorLayout) -> torch.Tensor:
    """A tensor over the frame's bytes: in the layout's own strides if these are dense."""
    shape = _packed_shape(layout)
    strides = layout.strides if _is_dense(layout) else _contiguous_strides(shape)
    start = offset + layout.shift
    storage = frame.untyped_storage()[start : start + _packed_bytes(layout)]
    return torch.empty(0, dtype=layout.dtype).set_(storage, 0, shape, strides)


def _windows(span: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    return span.set_(span.untyped_storage(), 0, layout.shape, layout.strides)


def _spread(packed: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    shift = layout.shift // layout.dtype.itemsize
    memory = torch.empty(shift + _reach(layout), dtype=layout.dtype)
    storage = memory.untyped_storage()[shift * layout.dtype.itemsize :]
    fresh = torch.empty(0, dtype=layout.dtype).set_(storage, 0, layout.shape, layout.strides)
    _packed(fresh, layout).copy_(packed)
    return fresh


def _reach(layout: TensorLayout) -> int:
    """How many elements of memory there are from a tensor's first to its last."""
    if 0 in layout.shape:
        return 0
    steps = zip(layout.strides, layout.shape, strict=True)
    return 1 + sum(stride * (size - 1) for stride, size in steps)


def _shares_elements(layout: TensorLayout) -> bool:
    """Whether elements may overlap in memory, apart from whole expanded dimensions.

    As in windows over a sequence; such a tensor is copied as the span of memory it lies in.
    """
    reach = 0
    for stride, size in sorted(zip(layout.strides, layout.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _is_dense(layout: TensorLayout) -> bool:
    """Whether the strides are those of a permuted contiguous tensor; so if there is no element."""
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
