"""Masks, indices, empty tensors, None, plain Python values and every nesting of them.

What goes wrong elsewhere: a mask is received as if it needed a gradient, and the backward waits
for one that never comes; one or two tensors per stage are assumed and the third is dropped; dicts
need a class of a fixed name, None has no code, and numbers are those of the first microbatch for
ever.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from stretto.errors import ExecutionError
from stretto.testing import run_ranks
from value_models import WORLDS, Case, Part, Pipeline, all_differences, schedules


def masked(part: Part, x: torch.Tensor) -> Any:
    """An activation, positions, a mask, and a tensor without elements."""
    n = len(x)
    return part.linear(x), torch.arange(n) + part.calls, x[:, 0] > 0, torch.empty(0, 4)


def masked_on(part: Part, h: Any, ids: Any, mask: Any, empty: Any) -> Any:
    """The activation is changed, the others are passed straight through."""
    assert not (ids.requires_grad or mask.requires_grad or empty.requires_grad)
    return part.linear(h) * mask[:, None], ids, mask, empty


def masked_used(part: Part, h: Any, ids: Any, mask: Any, empty: Any) -> torch.Tensor:
    """All four are used."""
    assert (ids.dtype, mask.dtype, empty.dtype) == (torch.int64, torch.bool, torch.float32)
    assert empty.shape == (0, 4)
    return part.linear(h + ids[:, None]) * mask[:, None] + empty.sum()


def nothing_in_it(part: Part, x: torch.Tensor) -> Any:
    """Tensors without elements that need a gradient, of several shapes."""
    h = part.linear(x)
    return h, h[:0], h[:, :0], h[:, None, 2:2], torch.empty(3, 0, 2).expand(3, 0, 2)


def nothing_in_it_on(part: Part, h: Any, *empty: Any) -> Any:
    """Work on what has no elements."""
    return part.linear(h), part.linear(empty[0]), *empty[1:]


def nothing_in_it_used(part: Part, h: Any, *empty: Any) -> torch.Tensor:
    """Sums of nothing, and what comes of putting nothing on."""
    h = torch.cat([h, empty[0]]) + sum(one.sum() for one in empty)
    return part.linear(torch.cat([h, empty[1]], 1))


def named(part: Part, x: torch.Tensor) -> Any:
    """A dict of a tensor and a tuple of another, None, a number and a text."""
    h = part.linear(x)
    return {"h": h, "aux": (torch.sin(h), None, 3, "tag")}


def named_on(part: Part, *, h: torch.Tensor, aux: Any) -> Any:
    """Reads all parts and sends the same form on."""
    a, nothing, number, text = aux
    assert (nothing, number, text) == (None, 3, "tag")
    return {"h": part.linear(h) * number, "aux": (a, nothing, number, text)}


def named_used(part: Part, *, h: torch.Tensor, aux: Any) -> torch.Tensor:
    """Uses both tensors and the number."""
    assert aux[1:] == (None, 3, "tag")
    return part.linear(h) * aux[0] * aux[2]


class Pair(NamedTuple):
    """A named tuple of a tensor and anything."""

    h: torch.Tensor
    rest: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that cannot be changed, with a value its constructor does not take as it is."""

    h: torch.Tensor
    rest: Any = None

    def __post_init__(self) -> None:
        assert self.rest != "refused by the constructor"


@dataclass
class Grown:
    """A dataclass with an attribute that is no field, and one with a default left out."""

    h: torch.Tensor
    name: str = field(default="grown", init=False)

    def __post_init__(self) -> None:
        self.double = self.h * 2


@dataclass
class Mapped(OrderedDict):  # type: ignore[type-arg]  # reason: as model outputs of other libraries are
    """A dataclass that is a dict of those fields that are not None."""

    h: Any = None
    rest: Any = None

    def __post_init__(self) -> None:
        if self.h is not None:
            self["h"] = self.h
        if self.rest is not None:
            self["rest"] = self.rest


def nested(part: Part, x: torch.Tensor) -> Any:
    """Every container in every other, empty ones too, and every plain value."""
    h = part.linear(x)
    plain = [None, True, 1, 1.0, "", "ü\ud800", 2**70, -0.0, math.inf, math.nan, 5e-324]
    kinds = {1: h.dtype, 1.5: h.shape, False: torch.bfloat16, None: torch.Size([]), "": ()}
    inner = Pair(torch.cos(h), [plain, kinds, [], {}, (), ((),), OrderedDict(b=1, a=[{}])])
    return Frozen(h, {"pair": inner, "most": h.max(dim=1), "places": h.detach().sort(dim=1)})


def nested_on(part: Part, value: Frozen) -> Any:
    """A dataclass in a named tuple in a list."""
    assert isinstance(value, Frozen)
    pair = value.rest["pair"]
    assert isinstance(pair, Pair)
    assert math.copysign(1, pair.rest[0][7]) == -1
    return Frozen(part.linear(value.h) * pair.h, value.rest)


def nested_used(part: Part, value: Frozen) -> torch.Tensor:
    """Tensors from all depths."""
    most, places = value.rest["most"], value.rest["places"]
    h = value.h * value.rest["pair"].h + most.values[:, None]
    return part.linear(h.gather(1, places.indices) + most[1][:, None])


def grown(part: Part, value: Any) -> Any:
    """A dataclass made anew on every stage, of what came in the one before."""
    h = value.double + len(value.name) if isinstance(value, Grown) else value
    return Grown(part.linear(h))


def by_turns(part: Part, x: torch.Tensor) -> Any:
    """A tensor, a tuple of one, a dict, a list, a named tuple, and numbers that change."""
    h = part.linear(x)
    forms = [h, (h,), {"h": h, "rest": part.calls}, [h, -0.0], Pair(h, 0.0), Mapped(h=h)]
    return forms[part.calls % len(forms)]


def tensor_in(args: Any, keywords: Any) -> torch.Tensor:
    """The activation in any of these forms."""
    if keywords:
        return keywords["h"]
    return args[0] if isinstance(args[0], torch.Tensor) else args[0][0]


def by_turns_on(part: Part, *args: Any, **keywords: Any) -> Any:
    """Another form than the one that came."""
    h = part.linear(tensor_in(args, keywords))
    return [Pair(h, None), {"h": h}, (h, part.calls), h][part.calls % 4]


def by_turns_used(part: Part, *args: Any, **keywords: Any) -> torch.Tensor:
    """The activation alone."""
    return part.linear(tensor_in(args, keywords))


def read(part: Part, h: torch.Tensor, value: Any, keys: Any) -> torch.Tensor:
    """What differs between them goes into the loss."""
    return part.linear(h) * (math.copysign(1, value) + len(f"{value} {list(keys)}"))


def in_turn(*values: Any) -> Case:
    """One value after the other, which the last stage reads."""

    def first(part: Part, x: torch.Tensor) -> Any:
        value = values[part.calls % len(values)]
        return part.linear(x), value, {value: None}

    def middle(part: Part, h: torch.Tensor, value: Any, keys: Any) -> Any:
        return part.linear(h), value, keys

    return Case(first, middle, read)


def emptied(part: Part, values: Any) -> Any:
    """A list whose items are taken out, and put back changed: the list is the stage's own."""
    h = values.pop()
    values.insert(0, part.linear(h))
    return values


CASES = {
    "masks and positions": Case(masked, masked_on, masked_used),
    "empty tensors": Case(nothing_in_it, nothing_in_it_on, nothing_in_it_used),
    "a dict with None and a text": Case(named, named_on, named_used),
    "every nesting": Case(nested, nested_on, nested_used),
    "another structure in every microbatch": Case(by_turns, by_turns_on, by_turns_used, steps=3),
    "attributes that are no fields": Case(
        grown, grown, lambda part, value: part.linear(value.h) + value.double
    ),
    "zeros of both signs": in_turn(-0.0, 0.0),
    "equal values of other types": in_turn(1, True, 1.0, 1),
    "numbers that are none": in_turn(math.nan, math.inf, -math.inf, math.nan),
    "lists that stages empty": Case(
        lambda part, x: [x, part.linear(x), part.linear(x) * 2],
        emptied,
        lambda part, values: emptied(part, values)[0],
    ),
    "nothing but positions": Case(
        lambda part, x: (torch.arange(len(x)), (x * 8).long(), None),
        lambda part, ids, x, none: (ids, x + ids[:, None], none),
        lambda part, ids, x, none: part.linear(x.float()) * ids[:, None],
    ),
}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_values_of_every_kind_arrive_as_they_were_sent(num_ranks: int, transport: str) -> None:
    """Structure, kinds and values are the plain run's on every stage; so are the gradients."""
    assert all_differences(num_ranks, transport, CASES) == []


class Colour(enum.IntEnum):
    """A number that is more than a number."""

    RED = 1


class Marked(torch.Tensor):
    """A tensor of a class of one's own."""


class Named(str):
    """A text that is more than a text."""


def of_a_local_class() -> Any:
    """An object whose class no other process can find by its name."""

    @dataclass
    class Here:
        h: Any = None

    return Here()


def jagged() -> torch.Tensor:
    """Rows of unequal length in one tensor."""
    return torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


HERE = __name__
REFUSED: dict[str, tuple[Any, str]] = {
    "a set": ({"deep": [1, {2}]}, "[1]['deep'][1] is a builtins.set"),
    "bytes": ([b"1"], "[1][0] is a builtins.bytes"),
    "a complex number": (1j, "[1] is a builtins.complex"),
    "an enumeration": (Colour.RED, f"[1] is a {HERE}.Colour"),
    "a text of a class": (Named("a"), f"[1] is a {HERE}.Named"),
    "a number of numpy": (np.float64(1), "[1] is a numpy.float64"),
    "an array": ((None, np.zeros(2)), "[1][1] is a numpy.ndarray"),
    "a default dict": (defaultdict(list), "[1] is a collections.defaultdict"),
    "a user's dict": (UserDict(), "[1] is a collections.UserDict"),
    "a module": (nn.ReLU(), "[1] is a torch.nn.modules.activation.ReLU"),
    "a function": (len, "[1] is a builtins.builtin_function"),
    "a class": (Frozen, "[1] is a builtins.type"),
    "a device": (torch.device("cpu"), "[1] is a torch.device"),
    "a key": ({(1, 2): None}, "[1] has the key (1, 2)"),
    "a local class": ({"a": of_a_local_class()}, f"[1]['a'] is of the class {HERE}:of_a_local"),
    "a sparse tensor": ({"t": torch.eye(2).to_sparse()}, "[1]['t'] is a tensor of layout torch.sp"),
    "a nested tensor": (Pair(jagged(), None), "[1]['h'] is a torch.nested"),
    "a tensor without data": (torch.empty(2, device="meta"), "[1] is a tensor without data"),
    "less than a byte": (
        {3: torch.empty(2, dtype=torch.int4)},
        "[1][3] is a tensor of dtype torch.int4",
    ),
    "a tensor of a class": (torch.ones(2).as_subclass(Marked), f"[1] is a {HERE}.Marked"),
}


def told_of_all(rank: int, group: Any, num_ranks: int) -> dict[str, str]:
    """What every rank is told in a first step with a value of each refused kind."""
    told: dict[str, str] = {}
    _, schedule = list(schedules(num_ranks, 4))[1]
    for name, (value, _) in REFUSED.items():
        pipeline = Pipeline(rank, group, schedule)
        case = Case(
            lambda part, x, value=value: (part.linear(x), value),
            lambda part, h, value: (part.linear(h), value),
            lambda part, h, value: part.linear(h),
        )
        pipeline.begin(case)
        try:
            pipeline.step(0)
        except ExecutionError as error:
            told[name] = f"{type(error).__name__}: {error}"
        pipeline.engine.close()
    return told


@pytest.mark.parametrize(("num_ranks", "transport"), [(1, "gloo"), (2, "gloo")])
def test_kinds_that_cannot_travel_are_refused_in_the_first_step(
    num_ranks: int, transport: str
) -> None:
    """The sender names action and path, also where nothing travels; the others leave, too."""
    answers = run_ranks(told_of_all, num_ranks, num_ranks, transport=transport)
    assert all(set(answer) == set(REFUSED) for answer in answers)
    for name, (_, expected) in REFUSED.items():
        where = "StageError: rank 0: 0F0 (stage 0, microbatch 0) raised InputError: "
        assert answers[0][name].startswith(f"{where}the output of stage 0{expected}"), name
