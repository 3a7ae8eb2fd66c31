"""The engine: runs a proved schedule on real stages, over a transport."""

from stretto.runtime.batch import along, whole
from stretto.runtime.engine import Engine
from stretto.runtime.hooks import HookEvent
from stretto.runtime.inner_loss import add_loss, collect_losses
from stretto.runtime.random_state import seeded_plain_run
from stretto.runtime.result import StepResult
from stretto.runtime.wire.inprocess import InProcessGroup, InProcessHub

__all__ = [
    "Engine",
    "HookEvent",
    "InProcessGroup",
    "InProcessHub",
    "StepResult",
    "add_loss",
    "along",
    "collect_losses",
    "seeded_plain_run",
    "whole",
]
