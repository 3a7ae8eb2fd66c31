"""User functions around the work of an engine, and in its bubbles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import InputError

LOCATIONS = ("before_forward", "after_forward", "before_backward", "after_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookEvent:
    """What a hook is told; it may look, and must not change tensors in place.

    Args:
        location: One of `LOCATIONS`.
        step: Number of the training step, from 0; evaluations carry that of the next one.
        stage: Index of the stage.
        microbatch: Index of the microbatch.
        train: Whether this is a training step.
        value: Before a forward its input, after it its output. Before a backward the gradients of
            its output (None on the last stage), after it those of its input (None on the first
            stage): a list with one entry per tensor, None for one that has no gradient.
    """

    location: str
    step: int
    stage: int
    microbatch: int
    train: bool
    value: Any


Hook = Callable[[HookEvent], None]


class HookHandle:
    """Takes a hook away again."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks = hooks
        self._hook = hook

    def remove(self) -> None:
        """The hook is not called any more; a second call does nothing."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class Hooks:
    """The hooks of one engine, called in the order in which they were registered."""

    def __init__(self) -> None:
        self._at: dict[str, list[Hook]] = {location: [] for location in LOCATIONS}

    def register(self, location: str, hook: Hook) -> HookHandle:
        """Call `hook` at a location.

        Raises:
            InputError: there is no such location.
        """
        if location not in self._at:
            raise InputError(
                f"there is no hook location {location!r}; locations: {', '.join(LOCATIONS)}"
            )
        self._at[location].append(hook)
        return HookHandle(self._at[location], hook)

    def at(self, location: str) -> Sequence[Hook]:
        """The hooks of a location."""
        return self._at[location]
