"""The gradient norm of the whole model, equal in every bit to the unsplit model's.

`torch.nn.utils.clip_grad_norm_` takes the norm of every parameter's gradient and then the norm of
these numbers, in the order of `named_parameters()`, grouped by device and dtype. So every rank
sends the norms of its own gradients, and all ranks put them into that order and finish the sum
in the same way. Norms per rank, added up, would not give the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from stretto.errors import InputError

NormKey = tuple[int, int]
"""Stage and position of a parameter in that stage's `parameters()`."""


def unique_parameters(
    stages: Mapping[int, torch.nn.Module],
) -> list[tuple[NormKey, torch.nn.Parameter]]:
    """The parameters of these stages in model order, each once."""
    seen: set[int] = set()
    found: list[tuple[NormKey, torch.nn.Parameter]] = []
    for stage in sorted(stages):
        # a stage that is a part of one whole module counts in the order of that module
        counted: int = getattr(stages[stage], "parameter_stage", stage)
        for position, parameter in enumerate(stages[stage].parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(((counted, position), parameter))
    return found


def local_norms(
    parameters: Sequence[tuple[NormKey, torch.nn.Parameter]], norm_type: float
) -> bytes:
    """The norm of every gradient there is, as bytes for the other ranks."""
    entries = [(key, parameter.grad) for key, parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(grad.detach(), norm_type) for _, grad in entries]
    rows = [
        [*key, grad.device.type, _name(grad.dtype), _name(norm.dtype), norm.item()]
        for (key, grad), norm in zip(entries, norms, strict=True)
    ]
    return json.dumps(rows).encode()


def total_norm(gathered: Sequence[bytes], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm over all ranks' gradients.

    Args:
        gathered: From `local_norms`, of every rank.
        norm_type: The p of the p-norm; `inf` for the largest absolute value.
        device: Where the result is put.
    """
    rows = sorted(
        (row for blob in gathered for row in json.loads(blob)), key=lambda row: (row[0], row[1])
    )
    if not rows:
        return torch.tensor(0.0, device=device)
    norms = [torch.tensor(row[5], dtype=getattr(torch, row[4])) for row in rows]
    ordered = [norms[index] for index in _grouped_order([row[3] for row in rows])]
    return torch.linalg.vector_norm(torch.stack(ordered), norm_type).to(device)


def _grouped_order(dtypes: Sequence[str]) -> list[int]:
    """The order in which torch visits gradients of these dtypes: asked of torch's own function."""
    placeholders = [torch.empty(0, dtype=getattr(torch, name)) for name in dtypes]
    groups = _group_tensors_by_device_and_dtype([placeholders], with_indices=True)  # type: ignore[list-item]  # reason: torch's own callers pass plain tensors
    return [index for _, indices in groups.values() for index in indices]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_clip_arguments(max_norm: float, norm_type: float) -> None:
    """Refuse a negative bound or a norm that is none.

    Raises:
        InputError: `max_norm` is negative or not a number, or `norm_type` is not positive.
    """
    if not max_norm >= 0:
        raise InputError(f"max_norm is {max_norm}; it must be 0 or more")
    if not norm_type > 0:
        raise InputError(f"norm_type is {norm_type}; it must be positive, or inf")
