"""Values that skip stages: straight to each user, and gradients chained back through them.

Elsewhere such a model is cut at its narrowest or not at all, or the value is carried through every
stage in between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reference import gradients_of, same_bits
from stretto import WithSkips
from stretto.errors import InputError, StageError
from stretto.ir import Schedule
from stretto.ir.placement import custom, v
from stretto.models import LayerSpec, build, split
from stretto.runtime import Engine
from stretto.schedules import build as build_schedule
from stretto.testing import run_ranks

WIDTH = 5


class Down(nn.Module):
    """Makes a named value of its own input and output."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.skip_outputs = (name,)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> WithSkips:
        out = torch.tanh(self.linear(h))
        return WithSkips(out, {self.skip_outputs[0]: {"pair": (out * 2, h), "note": "down"}})


class Up(nn.Module):
    """Uses named values."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.skip_inputs = names
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, **skips: Any) -> torch.Tensor:
        for name in self.skip_inputs:
            first, second = skips[name]["pair"]
            assert skips[name]["note"] == "down"
            h = h + first * second
        return torch.tanh(self.linear(h))


def layers() -> list[LayerSpec]:
    """A small U-net: values used once, three times, by neighbours, and inside one stage."""
    return [
        LayerSpec(Down, "a"),
        LayerSpec(Down, "b"),
        LayerSpec(Up, "a"),
        LayerSpec(Down, "c"),
        LayerSpec(Up, "c", "a"),
        LayerSpec(Up, "b", "a"),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(Up, "c"),
    ]


def schedules(p: int, m: int) -> list[Schedule]:
    """Every family at 8 or fewer stages, a V, and neighbours on one rank."""
    found = [
        build_schedule(name, num_ranks=p, num_microbatches=m) for name in ("gpipe", "one_f_one_b")
    ]
    for name in ("interleaved_1f1b", "looped_bfs"):
        found.append(build_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=2))
    plain = build_schedule("looped_bfs", num_ranks=1, num_microbatches=m, stages_per_rank=2 * p)
    for placement in (v(num_ranks=p), custom(sorted([*range(p)] * 2))):
        orders = [
            tuple(item for item in plain.ranks[0] if placement.rank_of(item.stage) == rank)  # type: ignore[union-attr]  # reason: single actions only
            for rank in range(p)
        ]
        found.append(Schedule(placement=placement, num_microbatches=m, ranks=tuple(orders)))
    return found


def compare(rank: int, group: Any, p: int) -> list[str]:
    """Two steps of each schedule against the plain model; what differs."""
    wrong: list[str] = []
    for index, schedule in enumerate(schedules(p, 3)):
        plain, stages = build(layers()), split(layers(), schedule, rank=rank)
        engine = Engine(stages, schedule, loss_fn=nn.functional.mse_loss, group=group)
        generator = torch.Generator().manual_seed(index)
        for step in range(2):
            x = torch.randn(7, WIDTH, generator=generator)
            total: Any = 0
            for piece in x.tensor_split(3):
                output = plain(piece).output
                loss = nn.functional.mse_loss(output, piece) / (7 / len(piece))
                loss.backward()
                total = total + loss.detach()
            if not same_bits(engine.step(x, x).loss, total.double()):
                wrong.append(f"schedule {index}, step {step}: loss")
            expected = gradients_of(plain)
            found = {n: g for stage in stages.values() for n, g in gradients_of(stage).items()}
            wrong += [
                f"schedule {index}, step {step}: {n}"
                for n, g in found.items()
                if not same_bits(g, expected[n])
            ]
        loss = engine.eval_step(x, x).loss
        if loss is None or not torch.isfinite(loss):
            wrong.append(f"schedule {index}: evaluation")
        engine.close()
    return wrong


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_skips_equal_the_plain_model_in_every_schedule(p: int) -> None:
    """Loss and gradients bit for bit, whatever stages a value passes by."""
    assert run_ranks(compare, p, p, transport="sockets") == [[]] * p


def test_skip_values_go_straight_to_their_users() -> None:
    """Ranks in between neither receive nor send them."""

    def work(rank: int, group: Any) -> list[str]:
        schedule = build_schedule("one_f_one_b", num_ranks=4, num_microbatches=1)
        parts = [
            LayerSpec(Down, "a"),
            LayerSpec(nn.Linear, 5, 5),
            LayerSpec(nn.Tanh),
            LayerSpec(Up, "a"),
        ]
        engine = Engine(
            split(parts, schedule, rank=rank), schedule, loss_fn=nn.functional.mse_loss, group=group
        )
        engine.step(torch.ones(1, 5), torch.ones(1, 5))
        return [str(item) for item in engine.program.ranks[rank] if "@" in str(item)]

    assert run_ranks(work, 4) == [
        ["0RECV_B0@3", "0SEND_F0@3", "0FREE_F0@3"],
        [],
        [],
        ["3RECV_F0@0", "3SEND_B0@0", "3FREE_B0@0"],
    ]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            [LayerSpec(Up, "a"), LayerSpec(Down, "a")],
            "uses the skip value 'a', but stage 1",
        ),
        ([LayerSpec(nn.Tanh), LayerSpec(Up, "x")], "uses the skip value 'x', but no stage"),
        ([LayerSpec(Down, "a"), LayerSpec(Down, "a")], "'a' is made by stages 0 and 1"),
    ],
)
def test_names_that_do_not_fit_are_refused_on_every_rank(parts: list[LayerSpec], told: str) -> None:
    """A used name needs one maker in an earlier stage."""

    def work(rank: int, group: Any) -> str:
        schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=1)
        with pytest.raises(InputError) as caught:
            Engine(split(parts, schedule, rank=rank), schedule, group=group)
        return str(caught.value)

    for text in run_ranks(work, 2):
        assert told in text


class Forgets(nn.Module):
    skip_outputs = ("a",)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h


def test_a_declared_value_that_is_not_returned_is_named() -> None:
    """The step ends with the stage and the name."""

    def work(rank: int, group: Any) -> None:
        schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=1)
        module = [Forgets(), Up("a")][rank]
        Engine({rank: module}, schedule, loss_fn=nn.functional.mse_loss, group=group).step(
            torch.ones(1, 5), torch.ones(1, 5)
        )

    with pytest.raises(StageError, match=r"stage 0 declares the skip values \['a'\] and did not"):
        run_ranks(work, 2, timeout_s=20)
