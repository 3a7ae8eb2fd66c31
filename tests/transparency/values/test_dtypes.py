"""Tensors of every dtype between stages, of several in one model, and of changing ones.

What goes wrong elsewhere: the receiver's buffer has the dtype of a first message, of a setting or
of the process's default, and the transport does not look: ones arrive as 1.0019, or bytes are
missing and all hang. Half precision comes back as gradients of single precision, and what is
neither float nor a common integer has no code on the wire.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from every_schedule import flat
from stretto.errors import ExecutionError
from stretto.schedules import one_f_one_b
from stretto.testing import run_ranks
from value_models import (
    WORLDS,
    Case,
    Part,
    Pipeline,
    Work,
    all_differences,
    drawn_batch,
    plain_run,
    schedules,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def one_of(dtype: torch.dtype) -> torch.Tensor:
    """Shape (2, 3), with bytes that differ; some floats are nan."""
    data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) * 41
    return (data % 2 == 0 if dtype is torch.bool else data.view(dtype)).reshape(2, 3)


def all_of_them(part: Part, x: torch.Tensor) -> Any:
    """An activation, and every dtype as a matrix, transposed, expanded, a number, and empty."""
    forms = [
        (one, one.t(), one[:, :1].expand(2, 4), one[1, 1], one[:0]) for one in map(one_of, DTYPES)
    ]
    return part.linear(x), forms


def all_of_them_on(part: Part, h: torch.Tensor, forms: Any) -> Any:
    """All of them, passed straight through."""
    return part.linear(h), forms


def only_h(part: Part, h: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The activation alone."""
    return part.linear(h.to(part.linear.weight.dtype))


def narrow(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A stage with output in bfloat16."""
    return part.linear(x.float()).bfloat16()


def wide(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A stage with output in single precision, whatever comes in."""
    return part.linear(x.float())


def doubled(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A stage with output in double precision."""
    return part.linear(x.float()).double()


def by_turns(*dtypes: torch.dtype, every: int = 1) -> Work:
    """A stage whose output has another dtype after so many microbatches."""

    def run(part: Part, x: torch.Tensor) -> torch.Tensor:
        return part.linear(x.float()).to(dtypes[part.calls // every % len(dtypes)])

    return run


def autocast(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A stage under autocast, whose output is bfloat16 and whose weights are not."""
    with torch.autocast("cpu", torch.bfloat16):
        return part.linear(x)


def weighed(part: Part, x: torch.Tensor) -> Any:
    """A gradient for an activation and for numbers without dimensions, in three dtypes."""
    h = part.linear(x)
    return h, h.mean(), h.std().double(), h.max().bfloat16()


def weighed_on(part: Part, h: Any, mean: Any, deviation: Any, most: Any) -> Any:
    """One number is changed, one passed through, one made anew from another."""
    return part.linear(h) - mean, mean * 2, deviation, most + mean.bfloat16()


def weighed_used(part: Part, h: Any, mean: Any, deviation: Any, most: Any) -> torch.Tensor:
    """All are used."""
    return part.linear(h) * deviation.float() + mean * most.float()


def wave(part: Part, x: torch.Tensor) -> Any:
    """Complex activations: one, its conjugate (lazily), its imaginary part, and its negative."""
    z = torch.complex(part.linear(x), torch.sin(x))
    return z, z.conj(), z.imag, torch.view_as_real(z), z.conj().imag


def wave_on(part: Part, z: Any, conjugate: Any, imaginary: Any, pairs: Any, negative: Any) -> Any:
    """Complex arithmetic, and views passed straight through."""
    return z * torch.exp(1j * part.linear(imaginary)), conjugate, imaginary, pairs, negative


def wave_used(part: Part, z: Any, conjugate: Any, imaginary: Any, pairs: Any, negative: Any) -> Any:
    """A real output from all of them."""
    return part.linear((z * conjugate).real + imaginary + pairs[..., 0] * negative)


def complex_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A real loss of a complex output."""
    return (output - target).abs().square().mean()


CASES = {
    "every dtype": Case(all_of_them, all_of_them_on, only_h),
    "float32, bfloat16, float32": Case(wide, narrow, wide),
    "bfloat16 everywhere": Case(narrow, narrow, narrow, dtype=torch.float32),
    "weights in bfloat16": Case(only_h, only_h, only_h, dtype=torch.bfloat16),
    "weights in float16": Case(only_h, only_h, only_h, dtype=torch.float16),
    "double precision inside": Case(narrow, doubled, wide),
    "another from step to step": Case(
        by_turns(torch.float32, torch.bfloat16, every=4), wide, wide, steps=3
    ),
    "another in every microbatch": Case(
        by_turns(torch.float32, torch.float64, torch.bfloat16),
        by_turns(torch.float16, torch.float32),
        wide,
    ),
    "autocast": Case(autocast, autocast, wide),
    "autocast in one stage": Case(wide, autocast, wide),
    "numbers without dimensions": Case(weighed, weighed_on, weighed_used),
    "complex": Case(wave, wave_on, wave_used),
    "complex to the end": Case(
        lambda part, x: torch.complex(part.linear(x), x),
        lambda part, z: z.conj() * part.linear(z.real),
        lambda part, z: z * part.linear(z.imag),
        loss=complex_loss,
    ),
}


@pytest.mark.parametrize(("num_ranks", "transport"), WORLDS)
def test_values_keep_their_dtype_and_gradients_come_back_in_it(
    num_ranks: int, transport: str
) -> None:
    """Bytes, losses and gradients are those of the plain run, in every dtype and any mix."""
    assert all_differences(num_ranks, transport, CASES) == []


def ones(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Ones in single precision, whatever the weights are."""
    part.held.setdefault("got", []).append((x.dtype, x.unique().tolist()))
    return (part.linear(x.float()) * 0 + 1).float()


def ones_in_bfloat16(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Ones in half precision."""
    return ones(part, x).bfloat16()


def under_other_defaults(rank: int, group: Any) -> list[str]:
    """Ranks whose processes have other default dtypes: ones in three stages, and all cases."""
    wrong: list[str] = []
    torch.set_default_dtype([torch.float32, torch.float64, torch.bfloat16][rank])
    pipeline = Pipeline(rank, group, one_f_one_b(num_ranks=3, num_microbatches=4))
    for name, case in CASES.items():
        found = pipeline.differences(case, plain_run(case, 3, 4))
        wrong += [f"{name}: {one}" for one in found]
    pipeline.begin(Case(ones, ones_in_bfloat16, ones))
    pipeline.step(0)
    pipeline.engine.close()
    got = pipeline.mine[rank].held["got"]
    expected = [None, torch.float32, torch.bfloat16][rank]
    if rank > 0 and got != [(expected, [1.0])] * 4:
        wrong.append(f"ones arrived as {got}")
    return wrong


def test_dtypes_do_not_depend_on_a_processs_default() -> None:
    """Ones are exactly 1.0 in float32 and in bfloat16, and all cases are right."""
    assert flat(run_ranks(under_other_defaults, 3, transport="gloo")) == []


def refusal(rank: int, group: Any, num_ranks: int) -> list[str]:
    """What a change of dtype leads to where fixed layouts were asked for."""
    told: list[str] = []
    for label, schedule in schedules(num_ranks, 4):
        if schedule.num_stages != num_ranks:
            continue
        pipeline = Pipeline(rank, group, schedule, fixed_layouts=True)
        case = CASES["another from step to step"]
        pipeline.begin(replace(case, batches=lambda step: drawn_batch(step, 8)))
        pipeline.step(0)
        try:
            pipeline.step(0)
        except ExecutionError as error:
            told.append(f"{label}: {error}")
        pipeline.engine.close()
    return told


def test_a_change_of_dtype_is_refused_where_layouts_are_fixed() -> None:
    """The sender names action, stage, microbatch, what was to be sent and what was before."""
    answers = run_ranks(refusal, 2, 2, transport="gloo")
    assert [len(one) for one in answers] == [2, 2]
    for told in answers[0]:
        assert "0SEND_F0: stage 0, microbatch 0: fixed layouts were asked for" in told
        assert "(bfloat16[2, 5]) in tensor was to be sent where (float32[2, 5])" in told
