"""Losses born inside the model: balance terms of experts, penalties of a layer.

A module calls `add_loss` while it runs; whoever runs it collects. Under an engine the term enters
the gradient on the stage where it was made and is reported in `result.losses`. In a plain run
`collect_losses` hands the terms to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from stretto.errors import InputError

Terms = list[tuple[str, torch.Tensor]]

_COLLECTING: ContextVar[Terms | None] = ContextVar("stretto_inner_losses", default=None)


def add_loss(name: str, value: torch.Tensor) -> None:
    """Add a term to the loss from inside a module.

    The term is a mean over the rows of the microbatch, as the main loss is, and is weighted like
    it. Where nobody collects (a module called by hand, a recomputation in backward) nothing
    happens.

    Args:
        name: What the term is reported as; terms of one name are added up over the stages.
        value: A tensor with one element.

    Raises:
        InputError: the value is not a tensor with one element.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"add_loss({name!r}): the value is {shape}; it must have one element")
    terms = _COLLECTING.get()
    if terms is not None:
        terms.append((name, value.reshape(()) if value.ndim else value))


@contextmanager
def collect_losses() -> Iterator[Terms]:
    """Collect what modules add inside the block, as (name, value) in the order of the calls."""
    terms: Terms = []
    token = _COLLECTING.set(terms)
    try:
        yield terms
    finally:
        _COLLECTING.reset(token)
