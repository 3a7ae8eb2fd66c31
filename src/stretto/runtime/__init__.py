"""The engine: runs a proved schedule on real stages, over a transport."""

from stretto.runtime.engine import Engine
from stretto.runtime.result import StepResult
from stretto.runtime.wire.inprocess import InProcessGroup, InProcessHub

__all__ = ["Engine", "InProcessGroup", "InProcessHub", "StepResult"]
