"""Values of which a part did not travel, without a word.

Seen: an attribute of a dataclass that is no field (set in `__post_init__`) was missing where the
object arrived; a tensor of a class of the user's arrived as a plain one; a class made inside a
function was refused by the receiver, and not where it was sent. What `max` and `sort` return could
not be sent, though it is a named tuple.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stretto.errors import InputError
from stretto.runtime.tree import flatten, spec_from_json, spec_to_json, unflatten
from stretto.runtime.wire.message import make_message


@dataclass
class Grown:
    """A dataclass that has more than its fields."""

    h: Any

    def __post_init__(self) -> None:
        self.twice = self.h * 2


class Marked(torch.Tensor):
    """A tensor of a class of one's own."""


def test_attributes_that_are_no_fields_travel() -> None:
    """Both are there again."""
    leaves, spec = flatten(Grown(torch.ones(1)))
    again = unflatten(spec_from_json(spec_to_json(spec)), leaves)
    assert (again.h.item(), again.twice.item()) == (1, 2)


def test_results_of_torch_operations_travel() -> None:
    """With their class, and so their names."""
    leaves, spec = flatten(torch.tensor([[1.0, 3.0]]).max(dim=1))
    again = unflatten(spec_from_json(spec_to_json(spec)), leaves)
    assert type(again) is torch.return_types.max
    assert (again.values.item(), again.indices.item()) == (3, 1)


def test_what_would_lose_a_part_is_refused_where_it_is_sent() -> None:
    """By its path."""

    @dataclass
    class Here:
        h: Any

    with pytest.raises(InputError, match=r"out\[0\] is of the class .*Here, which other ranks"):
        flatten((Here(1),), where="out")
    leaves, spec = flatten({"t": torch.ones(1).as_subclass(Marked)})
    with pytest.raises(InputError, match=r"out\['t'\] is a .*Marked, which cannot travel"):
        make_message(leaves, spec, [False], what="out")
