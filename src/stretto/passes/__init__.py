"""Lowering and other rewrites: `Schedule` → `Schedule`, one concern each."""

from stretto.passes.add_comms import add_comms
from stretto.passes.add_frees import add_frees
from stretto.passes.bubbles import bubble_slots
from stretto.passes.forward_part import forward_part
from stretto.passes.lower import lower

__all__ = ["add_comms", "add_frees", "bubble_slots", "forward_part", "lower"]
