"""Proof before run: what is wrong with a schedule, and how much memory it takes."""

from stretto.verify.deadlock import find_deadlock
from stretto.verify.lowering import lower_for
from stretto.verify.memory import peak_memory
from stretto.verify.proof import verify
from stretto.verify.violation import Rule, Transport, Violation, Wait

__all__ = [
    "Rule",
    "Transport",
    "Violation",
    "Wait",
    "find_deadlock",
    "lower_for",
    "peak_memory",
    "verify",
]
