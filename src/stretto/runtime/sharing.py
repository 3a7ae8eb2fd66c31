"""Which tensors share memory, so that a change of one in place would be a change of another.

In the unsplit model a stage may change what it is given in place, and all that share its memory
change with it. Where a value travels they would not, and where it does not travel autograd would
not notice. So the sender marks such tensors, and the stage that gets them refuses to have changed
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Bytes of an element, shape, strides."""


def find_shared(tensors: Sequence[torch.Tensor], kept: frozenset[int] = frozenset()) -> list[bool]:
    """Whether each tensor has elements in common with a parameter, or with another one of them.

    Args:
        tensors: Dense tensors, attached to their graphs; the same one may be there twice.
        kept: Storages that others hold as well; a tensor without a gradient that lies in one is
            shared. (One with a gradient is autograd's to watch.)
    """
    shared = [_is_of_parameter(tensor) or _lies_in(tensor, kept) for tensor in tensors]
    by_storage: dict[int, list[int]] = {}
    if len(tensors) > 1:
        for index, tensor in enumerate(tensors):
            if tensor.layout is torch.strided and tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
    for places in by_storage.values():
        for position, index in enumerate(places):
            for other in places[:position]:
                if _overlap(tensors[index], tensors[other]):
                    shared[index] = shared[other] = True
    return shared


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Where the memory of tensors without a gradient begins."""
    return frozenset(
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if tensor.layout is torch.strided and tensor.numel() and not tensor.requires_grad
    )


def _lies_in(tensor: torch.Tensor, kept: frozenset[int]) -> bool:
    if not kept or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in kept


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a leaf that needs a gradient, or a view of one: autograd would refuse, too."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = sorted((one, other), key=lambda tensor: tensor.data_ptr())
    distance = second.data_ptr() - first.data_ptr()
    return _do_overlap(_place(first), _place(second), distance)


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())


@lru_cache(maxsize=1024)
def _do_overlap(first: _Place, second: _Place, distance: int) -> bool:
    """Whether two tensors have an element in common, the second so many bytes behind the first.

    Cost: once per pair of layouts, one byte per element of the memory that they lie in.
    """
    size, reach = first[0], _reach(first)
    if distance >= size * reach:
        return False
    if second[0] != size or distance % size:
        return True  # seen as other numbers, as of the real parts of complex ones
    start = distance // size
    marks = torch.zeros(max(reach, start + _reach(second)), dtype=torch.bool)
    _elements(marks, first, 0).fill_(True)
    return bool(_elements(marks, second, start).any())


def _reach(place: _Place) -> int:
    return 1 + sum(stride * (size - 1) for size, stride in zip(*place[1:], strict=True))


def _elements(marks: torch.Tensor, place: _Place, start: int) -> torch.Tensor:
    """The marks of a tensor's elements, those of expanded dimensions once."""
    shape = [1 if stride == 0 else size for size, stride in zip(place[1], place[2], strict=True)]
    return marks.as_strided(shape, place[2], start)
