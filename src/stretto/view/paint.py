"""Colours of the terminal, and how numbers are written."""

from __future__ import annotations

from fractions import Fraction

from stretto.ir.action import Action, Kind, StageAction
from stretto.ir.costs import Number

_CODES = {Kind.F: "44;97", Kind.B: "42;30", Kind.I: "42;30", Kind.W: "43;30"}


def paint(text: str, action: Action | StageAction | None, colour: bool) -> str:
    """The text on the colour of its kind of work: F blue, B and I green, W yellow."""
    code = _CODES.get(action.kind) if isinstance(action, Action) else None
    if not colour or code is None or not text:
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def write_number(value: Number) -> str:
    """A number as short as it can be read: 33, 3/2, 0.0123."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return f"{value:.4g}"


def write_seconds(value: Number) -> str:
    """A time with its unit: 1.2 s, 34.5 ms, 678 us."""
    seconds = float(value)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"
