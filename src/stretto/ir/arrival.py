"""Orders found by letting the ranks run: whoever is free takes, of what has arrived, what it picks.

The clock is nominal: F, I and W last one unit each, B two, messages none. It only decides who
comes first while an order is made; the order itself holds no time. Whatever the picks, the
orders fit together: they are those of a run that took place. Skips change nothing here: what
they carry is made before what comes through the stages in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from stretto.ir.action import Action, Kind
from stretto.ir.deps import Value, gives, needs

HasArrived: TypeAlias = Callable[[Action], bool]
"""Whether all that an action needs has been produced by now."""

Pick: TypeAlias = Callable[[HasArrived], "Action | None"]
"""What a free rank starts now; None to wait for the next event."""

_DURATION = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def order_by_arrival(picks: Sequence[Pick], num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """The orders in which ranks run that follow these picks.

    Args:
        picks: For each rank what it takes next, asked whenever the rank is free and something
            has changed. A pick remembers what it has given.
        num_stages: Number of stages of the model.

    Returns:
        For each rank its actions. The run ends when no rank is busy and none picks anything.

    Cost: one round of picks per unit of time.
    """
    there: dict[Value, int] = {}
    orders: list[list[Action]] = [[] for _ in picks]
    free_at = [0] * len(picks)
    now = 0

    def has_arrived(action: Action) -> bool:
        return all(there.get(value, now + 1) <= now for value in needs(action, num_stages))

    while True:
        for rank, pick in enumerate(picks):
            action = pick(has_arrived) if free_at[rank] <= now else None
            if action is not None:
                orders[rank].append(action)
                free_at[rank] = now + _DURATION[action.kind]
                there.update(dict.fromkeys(gives(action), free_at[rank]))
        busy_until = [time for time in free_at if time > now]
        if not busy_until:
            return tuple(tuple(order) for order in orders)
        now = min(busy_until)
