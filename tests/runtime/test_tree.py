"""Nested values taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from stretto.errors import InputError
from stretto.runtime.tree import flatten, spec_from_json, spec_to_json, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Box:
    content: Any
    label: str = "box"


ONE = torch.ones(1)
VALUES: list[Any] = [
    ONE,
    None,
    (ONE,),
    [ONE, (None, 3, "tag", 2.5, True)],
    {"h": ONE, "aux": (ONE, None, 3, "tag")},
    OrderedDict(b=ONE, a=1),
    {1: ONE, None: 2, False: 3},
    Pair(ONE, [1]),
    Box({"x": (ONE, ONE)}, "deep"),
    (),
    {},
    float("inf"),
    torch.float16,
    torch.Size([2, 3]),
    [-0.0, 5e-324, {0.5: 1}],
    torch.ones(2, 2).max(dim=1),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_flattening_and_json(value: Any) -> None:
    """Types, keys, plain values and the places of tensors come back the same."""
    leaves, spec = flatten(value)
    assert hash(spec) == hash(spec_from_json(spec_to_json(spec)))
    again = unflatten(spec_from_json(spec_to_json(spec)), leaves)
    assert type(again) is type(value)
    assert again == value


def test_one_tensor_and_a_tuple_of_one_differ() -> None:
    """A 1-tuple does not become a tensor on the way."""
    assert flatten(ONE)[1] != flatten((ONE,))[1]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"aux": [1, {3}]}, r"\['aux'\]\[1\] is a builtins\.set"),
        ((object(),), r"\[0\] is a builtins\.object"),
        ({("a", 1): ONE}, "key"),
    ],
)
def test_kinds_that_cannot_travel_are_named_with_their_path(value: Any, path: str) -> None:
    """The error says where in the value the part is, and what it is."""
    with pytest.raises(InputError, match=path):
        flatten(value)


def test_classes_are_only_found_among_imported_modules() -> None:
    """A name from the wire imports nothing and calls nothing but tuples and dataclasses."""
    for name in ("os:system", "not_imported_at_all:Thing", "builtins:eval"):
        with pytest.raises(InputError, match="cannot find"):
            unflatten(("dataclass", name, (), ()), [])
