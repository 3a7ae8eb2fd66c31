"""Pipeline-parallel training for PyTorch in which the schedule is data.

Importing this package loads neither torch nor numpy; what needs them loads when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto import errors, ir

if TYPE_CHECKING:
    from stretto import passes, schedules, simulate, verify, view
    from stretto.models import split
    from stretto.runtime import Engine

__version__ = "0.1.0.dev0"
__all__ = [
    "Engine",
    "__version__",
    "errors",
    "ir",
    "passes",
    "schedules",
    "simulate",
    "split",
    "verify",
    "view",
]

_LAZY_MODULES = (
    "passes",
    "schedules",
    "simulate",
    "verify",
    "view",
    "runtime",
    "models",
    "testing",
)
_LAZY_NAMES = {"Engine": "stretto.runtime", "split": "stretto.models"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LAZY_MODULES:
        return import_module(f"stretto.{name}")
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")
