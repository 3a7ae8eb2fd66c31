"""Checks of what is about to be sent, where the user asked for them."""

from __future__ import annotations

import torch

from stretto.errors import StageError
from stretto.ir import Action
from stretto.runtime.wire.message import Layout, Message


class OutgoingChecks:
    """Refuses messages that are not finite, or not of the layout their edge had at first.

    Args:
        finite: Whether floating-point tensors must hold no nan and no inf.
        fixed_layouts: Whether structure, shapes, dtypes and plain values must stay, in training.
    """

    def __init__(self, *, finite: bool, fixed_layouts: bool) -> None:
        self._finite = finite
        self._fixed = fixed_layouts
        self._first: dict[tuple[int, str, int | None], Layout] = {}

    def check(self, action: Action, message: Message, train: bool) -> None:
        """Check the message of a SEND.

        Raises:
            StageError: it breaks a rule that was asked for; names stage and microbatch.
        """
        if self._finite:
            _check_finite(action, message)
        if self._fixed and train:
            edge = (action.stage, action.kind.value, action.peer)
            first = self._first.setdefault(edge, message.layout)
            if first != message.layout:
                raise StageError(
                    f"{action}: stage {action.stage}, microbatch {action.microbatch}: fixed "
                    f"layouts were asked for, and {_told(message.layout)} was to be sent where "
                    f"{_told(first)} was before",
                    action=str(action),
                )


def _check_finite(action: Action, message: Message) -> None:
    for index, tensor in enumerate(message.tensors):
        inexact = tensor.is_floating_point() or tensor.is_complex()
        if inexact and not bool(torch.isfinite(tensor).all()):
            raise StageError(
                f"{action}: stage {action.stage}, microbatch {action.microbatch}: tensor {index} "
                "of what is to be sent holds nan or inf",
                action=str(action),
            )


def _told(layout: Layout) -> str:
    tensors = ", ".join(
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in layout.tensors
    )
    return f"({tensors}) in {layout.spec[0]}"
