"""The losses of a step, brought from where they were made to all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stretto.runtime.executor import StepOutput
from stretto.runtime.wire.transport import Group


@dataclass(frozen=True, slots=True)
class ReportedLosses:
    """The loss, that of each microbatch, and what was added inside the model; all float64."""

    loss: torch.Tensor | None
    each: torch.Tensor | None
    added: Mapping[str, torch.Tensor]


def gather_losses(
    group: Group, output: StepOutput, *, loss_rank: int, deliver: bool
) -> ReportedLosses:
    """Exchange what each rank knows.

    Args:
        group: The ranks.
        output: This rank's part of the step.
        loss_rank: The rank of the last stage.
        deliver: Whether anything is exchanged; otherwise each rank reports what it has.
    """
    loss, each = _sum(output)
    rows = [[*term[:3], float(term.value)] for term in output.added]
    if deliver:
        blob = json.dumps([loss, each, rows]).encode()
        told = [json.loads(one) for one in group.gather(blob, "the losses of the step")]
        loss, each = told[loss_rank][:2]
        rows = [row for _, _, some in told for row in some]
    added: dict[str, float] = {}
    # terms are added one by one, in the order of the model, so the sum does not depend on the split
    for name, _, _, value in sorted(rows, key=lambda row: (row[0], row[1], row[2])):
        added[name] = added.get(name, 0.0) + value
    return ReportedLosses(
        loss=None if loss is None else torch.tensor(loss, dtype=torch.float64),
        each=None if not each else torch.tensor(each, dtype=torch.float64),
        added={name: torch.tensor(value, dtype=torch.float64) for name, value in added.items()},
    )


def _sum(output: StepOutput) -> tuple[float | None, list[float]]:
    """The reported loss, added ascending in its own dtype, and the loss of each microbatch."""
    terms = [output.losses[index] for index in sorted(output.losses)]
    if not terms:
        return None, []
    total = terms[0].scaled
    for term in terms[1:]:
        total = total + term.scaled
    return float(total), [float(term.value) for term in terms]
