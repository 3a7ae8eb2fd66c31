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
    value: object, *, where: str = "value", keep_objects: bool = False
) -> tuple[list[torch.Tensor], Spec]:
    """Take the tensors out of a nested value, in depth-first order.

    Args:
        value: The value.
        where: What to call the value in an error, for example `output of stage 2`.
        keep_objects: Whether a part of another kind stays in the spec as it is. Such a spec can
            only be built again by the same process.

    Raises:
        InputError: a part is of a kind that cannot travel; names its path.
    """
    leaves: list[torch.Tensor] = []
    return leaves, _spec(value, leaves, where, keep_objects)


def _spec(value: Any, leaves: list[torch.Tensor], path: str, keep: bool) -> Spec:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _TENSOR
    if value is None:
        return ("none",)
    if type(value) in _PLAIN:
        return ("plain", type(value).__name__, value)
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
    if isinstance(value, tuple) and fields is not None:
        return (
            "namedtuple",
            _class_name(type(value)),
            _children(zip(fields, value, strict=True), leaves, path, keep),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        parts = ((name, getattr(value, name)) for name in names)
        children = _children(parts, leaves, path, keep)
        return ("dataclass", _class_name(type(value)), names, children)
    if keep:
        return ("object", value)
    raise InputError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel "
        "between stages; tensors, None, bool, int, float, str and tuples, lists, dicts, named "
        "tuples and dataclasses of them can"
    )


def _children(
    parts: Iterable[tuple[object, object]], leaves: list[torch.Tensor], path: str, keep: bool
) -> tuple[Spec, ...]:
    return tuple(_spec(part, leaves, f"{path}[{key!r}]", keep) for key, part in parts)


def _has_odd_key(value: Iterable[object]) -> bool:
    return any(key is not None and type(key) not in _PLAIN for key in value)


def _key(key: object, path: str) -> Spec:
    if key is None or type(key) in _PLAIN:
        return ("none",) if key is None else ("plain", type(key).__name__, key)
    raise InputError(f"{path} has the key {key!r}; keys must be bool, int, float, str or None")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def unflatten(spec: Spec, leaves: Iterable[torch.Tensor | None]) -> Any:
    """Build the value again.

    Args:
        spec: From `flatten`.
        leaves: One tensor (or None) per tensor of the spec, in the same order.
    """
    return _build(spec, iter(leaves))


def _build(spec: Spec, leaves: Iterator[torch.Tensor | None]) -> Any:
    return _BUILDERS[spec[0]](spec, leaves)


def _build_class(spec: Spec, leaves: Iterator[torch.Tensor | None]) -> Any:
    kind = _find_class(spec[1])
    if spec[0] == "namedtuple":
        return kind(*(_build(child, leaves) for child in spec[2]))
    if issubclass(kind, dict):  # a mapping that is a dataclass, as some model outputs are
        return kind(**{k: _build(c, leaves) for k, c in zip(spec[2], spec[3], strict=True)})
    value = object.__new__(kind)
    for name, child in zip(spec[2], spec[3], strict=True):
        object.__setattr__(value, name, _build(child, leaves))
    return value


def _build_dict(spec: Spec, leaves: Iterator[torch.Tensor | None]) -> Any:
    kind = OrderedDict if spec[0] == "OrderedDict" else dict
    keys = [None if key[0] == "none" else key[2] for key in spec[1]]
    return kind((key, _build(child, leaves)) for key, child in zip(keys, spec[2], strict=True))


_BUILDERS: dict[str, Callable[[Spec, Iterator[torch.Tensor | None]], Any]] = {
    "tensor": lambda spec, leaves: next(leaves),
    "none": lambda spec, leaves: None,
    "plain": lambda spec, leaves: spec[2],
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


def _find_class(name: str) -> type:
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
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
