"""Where the batch of a step comes from: given as it is, drawn from an iterator, or sent by a rank.

An iterator or a function without arguments is asked exactly once per step and rank, at the start
of the step, and never ahead. What it gives is a pair (inputs, targets), or a triple with a dict of
extras. When it ends on any rank, all ranks hear of it in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from stretto.errors import InputError
from stretto.runtime.batch import Along, Whole
from stretto.runtime.step import StepCall
from stretto.runtime.tree import flatten, unflatten
from stretto.runtime.wire.message import (
    ALIGNMENT,
    decode_layout,
    encode_layout,
    make_message,
    pack,
    payload_bytes,
    unpack,
)


def draw(call: StepCall) -> StepCall:
    """Replace a source by what it gives for this step.

    Raises:
        StopIteration: an iterator has ended.
        InputError: targets were given besides a source, or it gave no pair or triple.
    """
    source = call.inputs
    if isinstance(source, Iterator):
        item: Any = _checked(call, lambda: next(source))
    elif callable(source) and not isinstance(source, torch.Tensor | Whole | Along):
        item = _checked(call, source)
    else:
        return call
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise InputError(
            f"the data source gave a {type(item).__name__}"
            f"{f' of {len(item)}' if isinstance(item, tuple | list) else ''}; it must give "
            "(inputs, targets) or (inputs, targets, extras)"
        )
    extras = dict(item[2]) if len(item) == 3 else {}
    return replace(call, inputs=item[0], targets=item[1], extras={**call.extras, **extras})


def _checked(call: StepCall, ask: Callable[[], Any]) -> Any:
    if call.targets is not None:
        raise InputError(
            "inputs is an iterator or a function, which gives targets as well; leave targets out"
        )
    return ask()


def encode_batch(call: StepCall) -> bytes:
    """Inputs, targets and extras as bytes, to be sent to ranks that were given none."""
    marked = {"inputs": call.inputs, "targets": call.targets, "extras": dict(call.extras)}
    tensors, spec = flatten(_to_plain(marked), where="the batch")
    flags = [tensor.requires_grad for tensor in tensors]
    plain = [tensor.detach().cpu() for tensor in tensors]
    message = make_message(plain, spec, flags, what="the batch")
    layout = encode_layout(message.layout)
    frame = torch.empty(payload_bytes(message.layout), dtype=torch.uint8)
    pack(message, frame, 0)
    return len(layout).to_bytes(ALIGNMENT, "little") + layout + frame.numpy().tobytes()


def decode_batch(call: StepCall, data: bytes) -> StepCall:
    """The call with the batch that another rank sent."""
    size = int.from_bytes(data[:ALIGNMENT], "little")
    layout = decode_layout(data[ALIGNMENT : ALIGNMENT + size])
    body = bytearray(data[ALIGNMENT + size :])
    frame = torch.empty(len(body), dtype=torch.uint8)
    if body:
        frame.copy_(torch.frombuffer(body, dtype=torch.uint8))
    tensors = [
        tensor.requires_grad_(one.requires_grad)
        for tensor, one in zip(unpack(layout, frame, 0), layout.tensors, strict=True)
    ]
    batch = _from_plain(unflatten(layout.spec, tensors))
    return replace(call, inputs=batch["inputs"], targets=batch["targets"], extras=batch["extras"])


def _to_plain(value: Any) -> Any:
    """Marks become tagged tuples, which can travel."""
    if isinstance(value, Whole):
        return ("#whole", value.value)
    if isinstance(value, Along):
        return ("#along", value.dim, value.value)
    if type(value) in (tuple, list):
        return type(value)(_to_plain(one) for one in value)
    if type(value) is dict:
        return {key: _to_plain(one) for key, one in value.items()}
    return value


def _from_plain(value: Any) -> Any:
    if type(value) is tuple and value and isinstance(value[0], str):
        if value[0] == "#whole":
            return Whole(value[1])
        if value[0] == "#along":
            return Along(value[2], value[1])
    if type(value) in (tuple, list):
        return type(value)(_from_plain(one) for one in value)
    if type(value) is dict:
        return {key: _from_plain(one) for key, one in value.items()}
    return value
