"""Pipeline-parallel training for PyTorch in which the schedule is data.

Importing this package loads neither torch nor numpy; what needs them loads when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto import errors, ir

if TYPE_CHECKING:
    from stretto import passes, schedules, simulate, verify, view
    from stretto.ir.calling import WithSkips
    from stretto.models import LayerSpec, split
    from stretto.runtime import Engine, InProcessHub, add_loss, along, collect_losses, whole

__version__ = "0.1.0.dev0"
__all__ = [
    "Engine",
    "InProcessHub",
    "LayerSpec",
    "WithSkips",
    "__version__",
    "add_loss",
    "along",
    "collect_losses",
    "errors",
    "ir",
    "passes",
    "schedules",
    "simulate",
    "split",
    "verify",
    "view",
    "whole",
]

_LAZY_MODULES = (
    "models",
    "passes",
    "runtime",
    "schedules",
    "simulate",
    "testing",
    "verify",
    "view",
)
_LAZY_NAMES = {
    "Engine": "stretto.runtime",
    "InProcessHub": "stretto.runtime",
    "LayerSpec": "stretto.models",
    "WithSkips": "stretto.ir.calling",
    "add_loss": "stretto.runtime",
    "along": "stretto.runtime",
    "collect_losses": "stretto.runtime",
    "split": "stretto.models",
    "whole": "stretto.runtime",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LAZY_MODULES:
        return import_module(f"stretto.{name}")
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")
