"""One rank dies, breaks or freezes at any of its actions: all others end at once and say who."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import Fault, check, schedule_actions

SUITE = [
    ("sockets", Fault("kill", 0, 3)),
    ("sockets", Fault("kill", 3, 19)),
    ("sockets", Fault("raise", 1, 9)),
    ("sockets", Fault("raise", 2, 25, "interleaved_1f1b")),
    ("sockets", Fault("freeze", 2, 5)),
    ("sockets", Fault("stick", 1, 12)),
    ("gloo", Fault("kill", 1, 7)),
    ("gloo", Fault("kill", 2, 24, "interleaved_1f1b")),
    ("gloo", Fault("raise", 3, 2)),
    ("gloo", Fault("raise", 0, 14, "gpipe")),
    ("gloo", Fault("freeze", 0, 11)),
    ("gloo", Fault("stick", 3, 6)),
]


@pytest.mark.parametrize(("transport", "fault"), SUITE)
def test_a_fault_on_one_rank_ends_the_step_on_all(
    transport: str, fault: Fault, tmp_path: Path
) -> None:
    """Within two seconds, or the deadline for one that is stuck, and with the right name."""
    check(fault, transport, tmp_path)


def spread() -> list[tuple[str, Fault]]:
    """A hundred faults, over all actions, ranks, kinds, transports and schedules."""
    found = []
    for number in range(100):
        kind = ("kill", "raise", "freeze", "stick")[number % 4]
        name = ("one_f_one_b", "interleaved_1f1b", "gpipe")[number % 3]
        rank = number // 4 % 4
        count = len(schedule_actions(Fault(kind, rank, 0, name)))
        fault = Fault(kind, rank, number * count // 100, name)
        found.append((("sockets", "gloo")[number // 2 % 2], fault))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(("transport", "fault"), spread())
def test_a_fault_at_any_action_ends_the_step_on_all(
    transport: str, fault: Fault, tmp_path: Path
) -> None:
    """A hundred of them."""
    check(fault, transport, tmp_path)
