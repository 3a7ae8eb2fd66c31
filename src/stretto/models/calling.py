"""Calling a layer by the one calling rule (`ir.calling`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto.ir.calling import Parameters


def call_layer(
    layer: Callable[..., Any], parameters: Parameters, value: Any, extras: Mapping[str, Any]
) -> Any:
    """Give a layer a value and those extras it accepts.

    Args:
        layer: Module or function.
        parameters: What it accepts, read once from its signature.
        value: The previous layer's result: tuple → positional, dict → keywords, else one argument.
        extras: Values every layer may read, by name.
    """
    args, keywords = parameters.arguments(value, extras)
    return layer(*args, **keywords)
