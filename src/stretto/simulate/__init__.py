"""Time without running: `Schedule` × costs → `Timeline`, and bounds no order can beat."""

from stretto.simulate.bounds import lower_bound
from stretto.simulate.clock import simulate

__all__ = ["lower_bound", "simulate"]
