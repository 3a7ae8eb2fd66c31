"""Payloads of every kind through every schedule: what is said here is what arrives there.

Elsewhere masks break the backward, dtypes are guessed, buffers are read while they are written, a
transposed tensor arrives scrambled, lengths are frozen at the first step, and parts are dropped.
Each case has a first stage that makes the payload and a last one that looks at all of it; stages
between pass it on. The plain run is the same layers in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from every_schedule import generated
from reference import gradients_of, same_bits
from stretto.ir import Schedule
from stretto.models import build, split
from stretto.runtime import Engine
from stretto.testing import run_ranks

WIDTH, MICROBATCHES = 6, 4


class Makes(nn.Module):
    """A linear layer whose result a function packs; counts its calls."""

    def __init__(self, pack: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.constant_(self.linear.bias, 0.25)
        nn.init.eye_(self.linear.weight)
        self.pack = pack
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        self.calls += 1
        return self.pack(h, self.calls - 1)


class Passes(nn.Module):
    """Returns what it is given, by the rule in which it was handed over."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return keywords or (args[0] if len(args) == 1 else args)


class Looks(nn.Module):
    """A function makes one tensor of all parts; then a linear layer."""

    def __init__(self, look: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.constant_(self.linear.weight, 0.125)
        nn.init.zeros_(self.linear.bias)
        self.look = look

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return self.linear(self.look(*args, **keywords))


def kinds_pack(h: torch.Tensor, call: int) -> Any:
    """Float, integer, bool and empty tensors, a scalar, halves, complex numbers."""
    ids = torch.arange(len(h)) + call
    return (
        h,
        ids,
        h.detach() > 0,
        torch.empty(0, 4),
        h.sum(),
        h.bfloat16(),
        torch.complex(h, h),
        torch.tensor([255], dtype=torch.uint8),
    )


def kinds_look(*parts: Any) -> torch.Tensor:
    """Checks dtypes and shapes, and uses all that has values."""
    h, ids, mask, empty, total, low, imaginary, byte = parts
    assert [one.dtype for one in (ids, mask, low, imaginary, byte)] == [
        torch.int64,
        torch.bool,
        torch.bfloat16,
        torch.complex128,
        torch.uint8,
    ]
    assert empty.shape == (0, 4)
    assert total.ndim == 0
    assert not any(one.requires_grad for one in (ids, mask, empty, byte))
    h = h * mask + total + low.double() * ids[:, None] + imaginary.imag
    return h * byte.double() / 255


def structure_pack(h: torch.Tensor, call: int) -> Any:
    """Names, None, numbers and texts; another structure in every second microbatch."""
    aux = (h * 2, None, 3 + call, "tag") if call % 2 else [h * 2, {"deep": (h.sin(), True)}]
    return {"h": h, "aux": aux}


def structure_look(*, h: torch.Tensor, aux: Any) -> torch.Tensor:
    """Reads all parts of either structure."""
    if isinstance(aux, tuple):
        assert aux[1] is None
        assert aux[3] == "tag"
        return h + aux[0] * aux[2]
    assert aux[1]["deep"][1] is True
    return h + aux[0] * aux[1]["deep"][0]


def layouts_pack(h: torch.Tensor, call: int) -> Any:
    """Transposed, expanded, channels-last and sliced tensors, a view, a split part."""
    square = h.unsqueeze(1).unsqueeze(3).expand(len(h), 2, WIDTH, 3).clone()
    return (
        h.t(),
        h[:1].expand(len(h), WIDTH),
        square.contiguous(memory_format=torch.channels_last),
        h[:, :2],
        h.view(-1),
        h.split(3, dim=1)[1],
    )


def layouts_look(*parts: Any) -> torch.Tensor:
    """Checks the strides and uses every part; its gradients come back in strange layouts, too."""
    turned, wide, square, narrow, flat, part = parts
    assert turned.stride() == (1, WIDTH)
    assert wide.stride(0) == 0 or len(wide) == 1
    assert square.is_contiguous(memory_format=torch.channels_last)
    assert narrow.stride(0) == WIDTH
    assert part.stride(0) == WIDTH
    h = turned.t() + wide + square.mean((1, 3)) + flat.view(turned.shape[1], WIDTH)
    return h + torch.cat([narrow, part, part[:, :1]], 1)


def changed_pack(h: torch.Tensor, call: int) -> Any:
    """A tensor and its double, for a user that changes what it gets."""
    return h * 1, h * 2


def changed_look(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Changes its inputs in place, as modules may in a plain run."""
    return first.relu_() + second.mul_(3).add_(1)


def repeated_pack(h: torch.Tensor, call: int) -> Any:
    """The same tensor twice, and a part of it."""
    return h, h, h[:, 0]


def repeated_look(first: torch.Tensor, second: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Each use counts."""
    return first.sin() + second * 3 + part[:, None]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "kinds": (kinds_pack, kinds_look),
    "structure": (structure_pack, structure_look),
    "layouts": (layouts_pack, layouts_look),
    "changed in place": (changed_pack, changed_look),
    "repeated": (repeated_pack, repeated_look),
}


def layers(case: str, count: int) -> list[nn.Module]:
    """The case's layers: the maker, those that pass on, the one that looks."""
    pack, look = CASES[case]
    return [Makes(pack), *(Passes() for _ in range(count - 2)), Looks(look)]


def compare(rank: int, group: Any, case: str) -> list[str]:
    """Two steps of other numbers of rows against the plain run, for every schedule."""
    wrong: list[str] = []
    for name, schedule in generated(2, MICROBATCHES):
        count = schedule.num_stages
        plain = build(layers(case, count))
        stages = split(layers(case, count), schedule, rank=rank)
        loss_fn = nn.functional.mse_loss
        engine = Engine(stages, schedule, loss_fn=loss_fn, group=group)
        for step, rows in enumerate((8, 9)):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
            total: Any = 0
            for piece in x.tensor_split(MICROBATCHES):
                loss = loss_fn(plain(piece), piece) / (rows / len(piece))
                loss.backward()
                total = total + loss.detach()
            if not same_bits(engine.step(x, x).loss, total):
                wrong.append(f"{name}, step {step}: loss")
            expected = gradients_of(plain)
            for stage in stages.values():
                wrong += [
                    f"{name}, step {step}: {key}"
                    for key, gradient in gradients_of(stage).items()
                    if not same_bits(gradient, expected[key])
                ]
        engine.close()
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_payloads_arrive_as_they_are_and_gradients_equal_the_plain_run(case: str) -> None:
    """In every schedule, in real processes, in every bit; also where all stages share a rank."""
    assert run_ranks(compare, 2, case, transport="sockets") == [[], []]


class Keeps(nn.Module):
    """Writes every output into one buffer, and changes it again right after the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(1, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer.fill_(self.calls)
        self.calls += 1
        return self.buffer


class Sees(nn.Module):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen.append(h[0, 0].item())
        return h * 1


def reuse(rank: int, group: Any, schedule: Schedule) -> list[float]:
    """What the last stage saw of a buffer that is written again and again."""
    modules = [Keeps(), Sees()]
    engine = Engine({rank: modules[rank]}, schedule, group=group, loss_fn=nn.functional.mse_loss)
    engine.step(torch.ones(4, 3), torch.ones(4, 3))
    engine.close()
    return modules[1].seen  # type: ignore[return-value]  # reason: the second module is Sees


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_a_buffer_used_again_is_sent_as_it_was(transport: str) -> None:
    """Stage 1 sees 0, 1, 2, 3, though stage 0 writes them all into one buffer."""
    for name, schedule in generated(2, 4):
        if schedule.num_stages == 2:
            answers = run_ranks(reuse, 2, schedule, transport=transport)
            assert answers[1] == [0, 1, 2, 3], name


def lengths(rank: int, group: Any) -> list[list[Any]]:
    """Steps of lengths 4, 6, 6, 3, and of 5 and 7 in one step: losses, and layouts sent so far."""
    answers: list[list[Any]] = []
    for _, schedule in generated(2, 2):
        torch.manual_seed(1)
        parts = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
        plain = nn.Sequential(*parts)
        stages = split(list(parts), schedule, rank=rank)
        engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
        row: list[Any] = []
        for shapes in ((4, 4), (6, 6), (6, 6), (3, 3), (5, 7)):
            x = [torch.ones(2, length, WIDTH) for length in shapes]
            with torch.no_grad():
                losses = [nn.functional.mse_loss(plain(one), one) for one in x]
            same = same_bits(engine.step(x, x).microbatch_losses, torch.stack(losses).double())
            row.append((same, engine.metadata_count))
        engine.close()
        answers.append(row)
    return answers


def test_lengths_may_change_between_steps_and_within_one() -> None:
    """Losses are the plain ones at each length; a step of an unchanged length tells no layout."""
    for answers in run_ranks(lengths, 2, transport="sockets"):
        for row in answers:
            assert all(same for same, _ in row)
            counts = [count for _, count in row]
            assert counts[1] == counts[2]
            assert counts[0] < counts[1] < counts[3] < counts[4]


def mixed(rank: int, group: Any) -> tuple[list[torch.dtype], float]:
    """Float32, bfloat16, float32 over three stages; the dtypes of gradients that come back."""
    torch.set_default_dtype([torch.float32, torch.float64, torch.float32][rank])
    made = [nn.Linear(4, 4).float(), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).float()]
    cast = [torch.float32, torch.bfloat16, torch.float32]

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = made[rank]

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return self.linear(h.to(cast[rank]))

    schedule = next(one for name, one in generated(3, 2) if name == "one_f_one_b")
    engine = Engine({rank: Casts()}, schedule, loss_fn=nn.functional.mse_loss, group=group)
    seen: list[torch.dtype] = []
    engine.register_hook(
        "before_backward",
        lambda event: None if event.value is None else seen.append(event.value[0].dtype),
    )
    ones = torch.ones(4, 4, dtype=torch.float32)
    loss = engine.step(ones, ones).loss.item()
    engine.close()
    return seen, loss


def test_dtypes_are_those_of_the_sender_and_gradients_come_back_in_them() -> None:
    """Whatever a rank's default dtype is."""
    answers = run_ranks(mixed, 3, transport="sockets")
    assert answers[0][0] == [torch.float32] * 2
    assert answers[1][0] == [torch.bfloat16] * 2
    assert len({loss for _, loss in answers}) == 1
