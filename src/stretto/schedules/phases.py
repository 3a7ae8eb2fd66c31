"""The three phases that schedules of the 1F1B kind share."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir import Action


def warmup_steady_cooldown(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """Forwards alone, then one forward and one backward in turn, then backwards alone.

    Args:
        forwards: All forwards of a rank, in order.
        backwards: As many backwards, in order.
        num_warmup: How many forwards come before the first pair, at most all.
    """
    steady = [
        action
        for pair in zip(forwards[num_warmup:], backwards, strict=False)  # the rest cools down
        for action in pair
    ]
    cooldown = backwards[len(forwards) - num_warmup :]
    return (*forwards[:num_warmup], *steady, *cooldown)
