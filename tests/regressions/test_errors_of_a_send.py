"""A message that cannot be sent.

Seen: a hook changed the output of a stage in place, and `step` raised a bare InputError, which said
neither rank nor action; callers that catch failed runs as ExecutionError missed it. What goes wrong
in a send now ends the step as what goes wrong in a stage does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.errors import ExecutionError
from stretto.runtime import Engine
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks


def change_an_output(rank: int, group: Any) -> str:
    """What a step raises whose first stage's output is changed before it is sent."""
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
    engine = Engine({rank: nn.Linear(3, 3)}, schedule, loss_fn=nn.functional.mse_loss, group=group)
    if rank == 0:
        engine.register_hook("after_forward", lambda event: event.value.detach().zero_())
    try:
        engine.step(torch.ones(2, 3), torch.ones(2, 3))
    except ExecutionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_an_error_in_a_send_names_rank_and_action() -> None:
    """The other rank is told of it, too."""
    first, second = run_ranks(change_an_output, 2)
    assert first.startswith("StageError: rank 0: 0SEND_F0 (stage 0, microbatch 0) raised InputErr")
    assert second == first.replace("StageError", "RemoteError")
