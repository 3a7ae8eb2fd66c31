"""Messages: layouts as bytes, and tensors through a frame with every bit and stride."""

from __future__ import annotations

import pytest
import torch

from reference import same_bits
from stretto.errors import InputError, TransportError
from stretto.runtime.tree import flatten
from stretto.runtime.wire.message import (
    ALIGNMENT,
    decode_layout,
    encode_layout,
    make_message,
    pack,
    payload_bytes,
    snapshot,
    unpack,
)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every layout and dtype."""
    base = torch.arange(24, dtype=torch.float32)
    return {
        "contiguous": base.view(2, 3, 4),
        "transposed": base.view(4, 6).t(),
        "channels last": base.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "expanded": base[:3].expand(5, 3),
        "expanded inside": base[:6].view(2, 1, 3).expand(2, 4, 3),
        "slice with gaps": base.view(4, 6)[:, :2],
        "slice with gaps, shifted": base.view(4, 6)[:, 1:3],
        "stepped": base[::2],
        "offset": base[5:],
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "empty, expanded": torch.empty(0, 1).expand(0, 5),
        "empty, of strange strides": base.as_strided((0, 0, 3), (9, 7, 2)),
        "windows": base.unfold(0, 5, 2),
        "windows over rows, expanded": base.view(4, 6).unfold(0, 2, 1)[None].expand(3, 3, 6, 2),
        "windows of a conjugate": torch.tensor([1 + 2j, -3j, 1j]).conj().unfold(0, 2, 1),
        "between each other": base.as_strided((2, 5), (7, 2), 3),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.tensor([-(2**62), 7]),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        "bf16": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "half": torch.tensor([1.5, float("inf")], dtype=torch.float16),
        "complex": torch.tensor([1 + 2j, -3j]),
        "conjugate": torch.tensor([1 + 2j, -3j]).conj(),
        "complex128": torch.tensor([[1 + 2j], [4.0]], dtype=torch.complex128),
        "nan": torch.tensor([float("nan"), -0.0], dtype=torch.float64),
        "float8": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    }


def test_tensors_keep_bits_shape_and_strides_through_a_frame() -> None:
    """One frame with tensors of every dtype and layout gives them back exactly."""
    named = tensors()
    leaves, spec = flatten(named)
    message = make_message(leaves, spec, [False] * len(leaves))
    frame = torch.full((ALIGNMENT + payload_bytes(message.layout),), 123, dtype=torch.uint8)
    pack(message, frame, ALIGNMENT)
    layout = decode_layout(encode_layout(message.layout))
    assert layout == message.layout
    for (name, sent), arrived in zip(named.items(), unpack(layout, frame, ALIGNMENT), strict=True):
        assert arrived.dtype == sent.dtype, name
        assert arrived.shape == sent.shape, name
        assert arrived.stride() == sent.stride(), name
        if sent.numel() and sent.is_floating_point():
            assert arrived.data_ptr() % 64 == sent.data_ptr() % 64, name
        assert same_bits(sent, arrived), name
        assert not arrived._is_view(), name


def test_snapshots_keep_bits_and_strides_and_are_their_own_memory() -> None:
    """What a snapshot holds does not change with the original."""
    for name, tensor in tensors().items():
        copied = snapshot(tensor)
        assert copied.stride() == tensor.stride(), name
        if tensor.numel() and tensor.is_floating_point():
            assert copied.data_ptr() % 64 == tensor.data_ptr() % 64, name
        assert same_bits(tensor, copied), name
        assert copied.numel() == 0 or copied.data_ptr() != tensor.data_ptr(), name


def test_an_expanded_tensor_travels_without_its_repetitions() -> None:
    """A row expanded a thousand times costs the bytes of one row."""
    row = torch.ones(1, 16).expand(1000, 16)
    layout = make_message([row], flatten(row)[1], [False]).layout
    assert payload_bytes(layout) == 64


def test_windows_over_shared_elements_travel_once() -> None:
    """Six windows over eight numbers take the room of eight numbers."""
    layout = make_message([torch.arange(8.0).unfold(0, 3, 1)], ("tensor",), [False]).layout
    assert payload_bytes(layout) == 64


def test_in_place_changes_of_one_received_tensor_leave_the_other_unmarked() -> None:
    """Tensors of one frame have version counters of their own."""
    message = make_message([torch.ones(2), torch.ones(2)], ("none",), [False, False])
    frame = torch.empty(payload_bytes(message.layout), dtype=torch.uint8)
    pack(message, frame, 0)
    first, second = unpack(message.layout, frame, 0)
    before = second._version
    first.add_(1)
    assert second._version == before
    assert second.tolist() == [1, 1]


@pytest.mark.parametrize("data", [b"", b"\x80\x04}", b"[1]", b'["[]", [["no", [], [], true]]]'])
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """Bytes that are no layout raise; they are never run."""
    with pytest.raises(TransportError, match="layout"):
        decode_layout(data)


def test_sparse_tensors_are_refused_by_name() -> None:
    """Only dense tensors travel."""
    value = {"deep": [torch.ones(1), torch.eye(2).to_sparse()]}
    leaves, spec = flatten(value)
    with pytest.raises(InputError, match=r"box\['deep'\]\[1\] is a tensor of layout .*sparse"):
        make_message(leaves, spec, [False, False], what="box")
