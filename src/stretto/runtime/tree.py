"""Nested values: taking the tensors out and putting them back.

A value between stages may nest tuples, lists, dicts, named tuples and dataclasses of tensors,
None and plain Python values. `flatten` takes the tensors out and leaves a spec, a nested tuple
of plain values that can be hashed, compared and written as JSON; `unflatten` builds the value
again. Nothing is ever unpickled: classes are found by name among modules already imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from stretto.errors import InputError

Spec: TypeAlias = tuple[Any, ...]

_PLAIN = (bool, int, float, str)
_TENSOR: Spec = ("tensor",)


def flatten(
    value: object, *, where: str = "value", keep_objects: bool = False, once: bool = False
) -> tuple[list[torch.Tensor], Spec]:
    """Take the tensors out of a nested value, in depth-first order.

    Args:
        value: The value.
        where: What to call the value in an error, for example `output of stage 2`.
        keep_objects: Whether a part of another kind stays in the spec as it is. Such a spec can
            only be built again by the same process.
        once: Whether a tensor that stands in several places is taken out once, and will be one
            tensor in all these places again.

    Raises:
        InputError: a part is of a kind that cannot travel; names its path.
    """
    leaves = _Taken(once)
    return leaves.tensors, _spec(value, leaves, where, keep_objects)


class _Taken:
    """The tensors that were taken out so far."""

    def __init__(self, once: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] | None = {} if once else None

    def add(self, tensor: torch.Tensor) -> Spec:
        place = len(self.tensors)
        if self._places is not None and self._places.setdefault(id(tensor), place) != place:
            return ("again", self._places[id(tensor)])
        self.tensors.append(tensor)
        return _TENSOR


def _spec(value: Any, leaves: _Taken, path: str, keep: bool) -> Spec:
    if isinstance(value, torch.Tensor):
        return leaves.add(value)
    if value is None:
        return ("none",)
    if type(value) in _PLAIN:
        return _plain(value)
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.Size):
        return ("size", tuple(value))
    if type(value) in (tuple, list):
        return (type(value).__name__, _children(enumerate(value), leaves, path, keep))
    if type(value) in (dict, OrderedDict) and not (keep and _has_odd_key(value)):
        return (
            type(value).__name__,
            tuple(_key(key, path) for key in value),
            _children(value.items(), leaves, path, keep),
        )
    fields: Any = getattr(value, "_fields", None)
    if isinstance(value, tuple) and (fields is not None or _is_torch_result(type(value))):
        names = getattr(type(value), "__match_args__", ()) if fields is None else fields
        children = _children(zip(names, value, strict=True), leaves, path, keep)
        return ("namedtuple", _class_name(type(value), path), names, children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _attributes(value)
        parts = ((name, getattr(value, name)) for name in names)
        children = _children(parts, leaves, path, keep)
        return ("dataclass", _class_name(type(value), path), names, children)
    if keep:
        return ("object", value)
    raise InputError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel "
        "between stages; tensors, None, bool, int, float, str and tuples, lists, dicts, named "
        "tuples and dataclasses of them can"
    )


def _children(
    parts: Iterable[tuple[object, object]], leaves: _Taken, path: str, keep: bool
) -> tuple[Spec, ...]:
    return tuple(_spec(part, leaves, f"{path}[{key!r}]", keep) for key, part in parts)


def _attributes(value: Any) -> tuple[str, ...]:
    """The fields of a dataclass, and what else was set on it (but not on one that is a dict)."""
    fields = [field.name for field in dataclasses.fields(value)]
    others = () if isinstance(value, dict) else getattr(value, "__dict__", ())
    return tuple(dict.fromkeys((*fields, *others)))


def _has_odd_key(value: Iterable[object]) -> bool:
    return any(key is not None and type(key) not in _PLAIN for key in value)


def _key(key: object, path: str) -> Spec:
    if key is None or type(key) in _PLAIN:
        return ("none",) if key is None else _plain(key)
    raise InputError(f"{path} has the key {key!r}; keys must be bool, int, float, str or None")


def _plain(value: Any) -> Spec:
    # zeros of both signs are equal as floats, and nan is not equal to itself
    told = value.hex() if type(value) is float else value
    return ("plain", type(value).__name__, told)


def _is_torch_result(kind: type) -> bool:
    """Whether a class is one of the named tuples that operations such as `max` return."""
    return kind.__module__ == "torch.return_types"


def _class_name(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise InputError(
            f"{path} is of the class {name}, which other ranks cannot find by that name; define it "
            "at the top of a module that every rank imports"
        )
    return name


def tensor_paths(spec: Spec, where: str) -> Iterator[str]:
    """What the tensors of a spec are called in errors, in order; `where` as in `flatten`."""
    if spec == _TENSOR:
        yield where
    elif spec[0] in ("tuple", "list"):
        for index, child in enumerate(spec[1]):
            yield from tensor_paths(child, f"{where}[{index}]")
    elif spec[0] in ("dict", "OrderedDict"):
        for key, child in zip(spec[1], spec[2], strict=True):
            yield from tensor_paths(child, f"{where}[{_build(key, _Leaves(()))!r}]")
    elif spec[0] in ("namedtuple", "dataclass"):
        for name, child in zip(spec[2], spec[3], strict=True):
            yield from tensor_paths(child, f"{where}[{name!r}]")


def unflatten(spec: Spec, leaves: Iterable[torch.Tensor | None]) -> Any:
    """Build the value again.

    Args:
        spec: From `flatten`.
        leaves: One tensor (or None) per tensor of the spec, in the same order.
    """
    return _build(spec, _Leaves(leaves))


class _Leaves:
    """The tensors that are put back, in order."""

    def __init__(self, leaves: Iterable[torch.Tensor | None]) -> None:
        self._coming = iter(leaves)
        self._placed: list[torch.Tensor | None] = []

    def next(self) -> torch.Tensor | None:
        self._placed.append(next(self._coming))
        return self._placed[-1]

    def again(self, place: int) -> torch.Tensor | None:
        return self._placed[place]


def _build(spec: Spec, leaves: _Leaves) -> Any:
    return _BUILDERS[spec[0]](spec, leaves)


def _build_class(spec: Spec, leaves: _Leaves) -> Any:
    kind: Any = _find_class(spec[1])
    if spec[0] == "namedtuple":
        make = kind if _is_torch_result(kind) else kind._make
        return make([_build(child, leaves) for child in spec[3]])
    if issubclass(kind, dict):  # a mapping that is a dataclass, as some model outputs are
        return kind(**{k: _build(c, leaves) for k, c in zip(spec[2], spec[3], strict=True)})
    value = object.__new__(kind)
    for name, child in zip(spec[2], spec[3], strict=True):
        object.__setattr__(value, name, _build(child, leaves))
    return value


def _build_dict(spec: Spec, leaves: _Leaves) -> Any:
    kind = OrderedDict if spec[0] == "OrderedDict" else dict
    keys = [_build(key, leaves) for key in spec[1]]
    return kind((key, _build(child, leaves)) for key, child in zip(keys, spec[2], strict=True))


_BUILDERS: dict[str, Callable[[Spec, _Leaves], Any]] = {
    "tensor": lambda spec, leaves: leaves.next(),
    "again": lambda spec, leaves: leaves.again(spec[1]),
    "none": lambda spec, leaves: None,
    "plain": lambda spec, leaves: float.fromhex(spec[2]) if spec[1] == "float" else spec[2],
    "dtype": lambda spec, leaves: getattr(torch, spec[1]),
    "size": lambda spec, leaves: torch.Size(spec[1]),
    "object": lambda spec, leaves: spec[1],
    "tuple": lambda spec, leaves: tuple(_build(child, leaves) for child in spec[1]),
    "list": lambda spec, leaves: [_build(child, leaves) for child in spec[1]],
    "dict": _build_dict,
    "OrderedDict": _build_dict,
    "namedtuple": _build_class,
    "dataclass": _build_class,
}


def _found(name: str) -> Any:
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _find_class(name: str) -> type:
    found = _found(name)
    is_named_tuple = isinstance(found, type) and issubclass(found, tuple)
    if not isinstance(found, type) or not (is_named_tuple or dataclasses.is_dataclass(found)):
        raise InputError(
            f"a value between stages has the class {name}, which this rank cannot find; define "
            "it at the top of a module that every rank imports"
        )
    return found


def spec_to_json(spec: Spec) -> str:
    """The spec as JSON, exact for every plain value."""
    return json.dumps(spec)


def spec_from_json(text: str) -> Spec:
    """Read a spec written by `spec_to_json`."""
    return _tuples(json.loads(text))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def tensor_spec() -> Spec:
    """The spec of a value that is one tensor."""
    return _TENSOR
