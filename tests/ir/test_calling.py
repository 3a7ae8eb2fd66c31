"""The calling rule: how a value and the extras become a call."""

from __future__ import annotations

from collections import namedtuple

import pytest

from stretto.ir.calling import accepted_keywords, gather, parameters_of, spread

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "args", "keywords"),
    [
        (1, (1,), {}),
        (None, (None,), {}),
        ((1, 2), (1, 2), {}),
        ((), (), {}),
        ({"a": 1}, (), {"a": 1}),
        ([1, 2], ([1, 2],), {}),
        (Point(1, 2), (Point(1, 2),), {}),
    ],
)
def test_spread_by_kind(value, args, keywords):
    """A plain tuple is positional, a dict is keywords, all else is one argument."""
    assert spread(value) == (args, keywords)
    assert spread(gather(args, keywords)) == (args, keywords)


def test_accepted_keywords_come_from_the_signature():
    """Names that a keyword can fill are accepted; `**rest` accepts all."""
    assert accepted_keywords(lambda x, /, y, *, z: 0) == {"y", "z"}
    assert accepted_keywords(lambda x, **rest: 0) is None
    assert accepted_keywords(lambda *xs: 0) == frozenset()


def test_a_callable_without_signature_accepts_no_keywords():
    """A built-in function whose signature cannot be read is called with its value alone."""
    assert accepted_keywords(iter) == frozenset()


def test_a_module_is_asked_for_its_forward():
    """Of an object with `forward`, forward's signature counts, not that of the call."""

    class Module:
        def __call__(self, *args, **keywords): ...

        def forward(self, x, mask): ...

    assert accepted_keywords(Module()) == {"x", "mask"}


def test_extras_go_only_to_who_names_them():
    """An extra that a callable does not name is left out of its call."""
    parameters = parameters_of(lambda x, mask: 0)
    assert parameters.arguments(1, {"mask": 2, "other": 3}) == ((1,), {"mask": 2})


def test_the_value_wins_over_an_extra_of_the_same_name():
    """What the previous layer hands over is not replaced or doubled by an extra."""
    parameters = parameters_of(lambda x, mask=None: 0)
    assert parameters.arguments((1, 2), {"x": 7, "mask": 8}) == ((1, 2), {})
    assert parameters.arguments({"x": 1, "mask": 2}, {"mask": 8}) == ((), {"x": 1, "mask": 2})


def test_a_parameter_for_all_extras_gets_them_in_one():
    """A callable with `stage_extras` gets every extra there, apart from its own keywords."""
    parameters = parameters_of(lambda *args, stage_extras=None, **keywords: 0)
    assert parameters.arguments({"x": 1}, {"m": 2}) == ((), {"x": 1, "stage_extras": {"m": 2}})
    assert parameters.keywords is None
