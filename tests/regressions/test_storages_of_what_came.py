"""A received tensor that is looked at as memory.

Seen: all tensors of a message lay in one storage behind its header, so `as_strided` with an offset
of 0 read the header, and saving one tensor wrote them all.
"""

from __future__ import annotations

import torch

from stretto.runtime.tree import flatten
from stretto.runtime.wire.message import make_message, pack, payload_bytes, unpack


def test_a_received_tensor_begins_where_its_storage_does() -> None:
    """Whatever it travelled with, and however it lies in memory."""
    value = [
        torch.arange(4.0),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(20.0)[3:9],
        torch.arange(20.0).view(4, 5)[:, 1:3],
        torch.ones(1, 3).expand(2, 3),
        torch.arange(6.0).unfold(0, 3, 1),
    ]
    tensors, spec = flatten(value)
    message = make_message(tensors, spec, [False] * len(tensors))
    frame = torch.zeros(64 + payload_bytes(message.layout), dtype=torch.uint8)
    pack(message, frame, 64)
    for sent, came in zip(tensors, unpack(message.layout, frame, 64), strict=True):
        assert torch.equal(sent, came)
        assert came.storage_offset() == 0
        assert torch.equal(came.as_strided(came.shape, came.stride(), 0), sent)
        assert came.untyped_storage().nbytes() <= sent.untyped_storage().nbytes()
