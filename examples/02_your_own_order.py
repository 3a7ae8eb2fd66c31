"""Can I write a schedule myself, and what does stretto do with it?

A schedule is text, if you like: one line of actions per rank. It is proved, timed, drawn and run as
any other; a mistake is found before anything runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto import Engine
from stretto.ir.text import parse_orders
from stretto.simulate import simulate
from stretto.testing import run_ranks
from stretto.verify import verify
from stretto.view import draw_timeline, summarise

MINE = parse_orders(
    """
0F0 0F1 0F2 0B0 0B1 0B2
1F0 1F1 1B0 1F2 1B1 1B2
2F0 2B0 2F1 2B1 2F2 2B2
""".strip()
)
WRONG = parse_orders("0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0\n2F0 2B0 2F1 2B1")


def run(rank: int, group: Any) -> float:
    """One step of a small model under the order."""
    torch.manual_seed(rank)
    engine = Engine({rank: nn.Linear(4, 4)}, MINE, loss_fn=nn.functional.mse_loss, group=group)
    loss = engine.step(torch.ones(6, 4), torch.zeros(6, 4)).loss
    assert loss is not None, "every rank gets the loss, unless told otherwise"
    return loss.item()


def main() -> None:
    """Prove, draw, run; and see a mistake."""
    assert verify(MINE) == ()
    timeline = simulate(MINE)
    print(draw_timeline(timeline))
    print(summarise(timeline))
    losses = run_ranks(run, 3)
    print(f"every rank has the loss: {len(set(losses)) == 1}")
    print(verify(WRONG)[0])


if __name__ == "__main__":
    main()
