"""The engine's own behaviours, on threads and in processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from reference import gradients_of, same_bits, toy_batch, toy_layers
from stretto.errors import InputError, RemoteError, ScheduleError, StageError
from stretto.ir import Kind, Schedule, bubble_fraction, compute_spans, makespan, peak_memory
from stretto.ir.placement import custom
from stretto.ir.text import parse_orders
from stretto.models import split
from stretto.runtime import Engine, InProcessHub
from stretto.schedules import build, one_f_one_b
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss


def toy_engine(rank: int, group: Any, schedule: Schedule, **options: Any) -> Engine:
    """An engine on the toy model of four layers."""
    stages = split(toy_layers(4), schedule, rank=rank)
    return Engine(stages, schedule, loss_fn=MSE, group=group, **options)


@pytest.mark.parametrize("rule", ["buffered", "rendezvous", "blocking", "nccl"])
@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", 0), ("one_f_one_b", 0), ("interleaved_1f1b", 2), ("looped_bfs", 2)]
)
def test_schedules_run_under_every_rule_of_sending(rule: str, name: str, v: int) -> None:
    """The proved order also runs where sends wait, or block, for their receivers."""
    options = {"stages_per_rank": v} if v else {}

    def work(rank: int, group: Any) -> float:
        schedule = build(name, num_ranks=2, num_microbatches=5, **options)
        engine = toy_engine(rank, group, schedule)
        return engine.step(*toy_batch(10)).loss.item()

    losses = run_ranks(work, 2, rule=rule, timeout_s=20)
    assert losses == pytest.approx([0.5855505476851043] * 2, rel=1e-12)


def evaluate(rank: int, group: Any) -> dict[str, Any]:
    """Evaluations of other sizes before, between and after training steps."""
    engine = toy_engine(rank, group, one_f_one_b(num_ranks=2, num_microbatches=4))
    counts, losses = [], []
    for mode, rows, m in (
        ("eval", 10, None),
        ("train", 8, None),
        ("eval", 4, 2),
        ("train", 8, None),
        ("eval", 6, 1),
        ("eval", 7, None),
        ("train", 8, None),
    ):
        before = {
            n: p.grad.clone()
            for s in engine.stages.values()
            for n, p in s.named_parameters()
            if p.grad is not None
        }
        if mode == "train":
            losses.append(engine.step(*toy_batch(rows)).loss.item())
        else:
            result = engine.eval_step(*toy_batch(rows), num_microbatches=m, return_outputs=True)
            losses.append(result.loss.item())
            for stage in engine.stages.values():
                assert all(module.training for module in stage.modules())
                for name, gradient in gradients_of(stage).items():
                    assert same_bits(gradient, before[name])
            if rank == 1:
                assert result.outputs.shape == (rows, 4)
                assert not result.outputs.requires_grad
            else:
                assert result.outputs is None
            assert result.loss_rank == 1
        counts.append(engine.metadata_count)
    engine.close()
    return {"losses": losses, "counts": counts}


def test_evaluation_of_any_size_between_training_steps() -> None:
    """Each result equals the plain model's; gradients and modes are left as they were."""
    model = nn.Sequential(*toy_layers(4))
    expected = []
    for rows in (10, 8, 4, 8, 6, 7, 8):
        inputs, targets = toy_batch(rows)
        expected.append(MSE(model(inputs), targets).item())
    for answer in run_ranks(evaluate, 2, transport="gloo"):
        assert answer["losses"] == pytest.approx(expected, rel=1e-12)


def count_layouts(rank: int, group: Any) -> list[int]:
    """How many layouts a rank has sent after each of six steps."""
    engine = toy_engine(rank, group, one_f_one_b(num_ranks=2, num_microbatches=4))
    counts = []
    for rows in (8, 8, 8, 12, 12, 8):
        engine.step(*toy_batch(rows))
        counts.append(engine.metadata_count)
    engine.close()
    return counts


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_layouts_travel_only_when_they_change(transport: str) -> None:
    """One layout per edge and change of shape; none while shapes stay."""
    assert run_ranks(count_layouts, 2, transport=transport) == [[1, 1, 1, 2, 2, 3]] * 2


@dataclass
class Payload:
    h: torch.Tensor
    mask: torch.Tensor
    note: Any


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Payload:
        self.calls += 1
        return Payload(self.linear(x), x > 0, {"step": self.calls, "none": None})


class Middle(nn.Module):
    def forward(self, value: Payload) -> dict[str, Any]:
        assert value.mask.dtype is torch.bool
        assert not value.mask.requires_grad
        assert value.h.requires_grad
        return {"h": value.h.t() * 2, "pair": (value.mask, value.note["step"]), "ids": None}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(
        self, h: torch.Tensor, pair: tuple[torch.Tensor, int], ids: None, scale: torch.Tensor
    ) -> torch.Tensor:
        self.seen.append(pair[1])
        assert not h.is_contiguous()
        return h.t() * pair[0] * scale


def nested(rank: int, group: Any) -> tuple[list[int], Any]:
    """One step with nested values between three stages."""
    torch.manual_seed(3)
    modules = [First(), Middle(), Last()]
    schedule = one_f_one_b(num_ranks=3, num_microbatches=4)
    engine = Engine({rank: modules[rank]}, schedule, loss_fn=MSE, group=group)
    inputs, targets = toy_batch(8)
    engine.step(inputs, targets, scale=torch.arange(8.0, dtype=torch.float64)[:, None])
    engine.close()
    grad = modules[0].linear.weight.grad if rank == 0 else None
    return modules[2].seen, None if grad is None else grad


def test_nested_values_cross_with_changing_python_values_and_extras() -> None:
    """Dataclasses, dicts, masks, None and counters arrive; gradients equal the plain model's."""
    answers = run_ranks(nested, 3, transport="gloo")
    assert answers[2][0] == [1, 2, 3, 4]
    torch.manual_seed(3)
    linear = nn.Linear(4, 4, dtype=torch.float64)
    inputs, targets = toy_batch(8)
    scale = torch.arange(8.0, dtype=torch.float64)[:, None]
    for x, t, s in zip(inputs.split(2), targets.split(2), scale.split(2), strict=True):
        h = (linear(x).t() * 2).t() * (x > 0) * s
        (MSE(h, t) / 4).backward()
    assert same_bits(answers[0][1], linear.weight.grad)


def record(rank: int, group: Any) -> Any:
    """The timeline of a recorded step."""
    schedule = build("interleaved_1f1b", num_ranks=2, num_microbatches=4, stages_per_rank=2)
    engine = toy_engine(rank, group, schedule, record=True)
    timeline = engine.step(*toy_batch(8)).timeline
    engine.record = False
    assert engine.step(*toy_batch(8)).timeline is None
    engine.close()
    return timeline


def test_recorded_timelines_hold_what_ran_in_an_order_that_can_be() -> None:
    """Every action once, no forward before the one it needs, memory as planned, on every rank."""
    first, second = run_ranks(record, 2, transport="gloo")
    assert first == second
    spans = compute_spans(first)
    ran = {(s.action.stage, s.action.kind, s.action.microbatch): s for s in spans}
    assert len(ran) == len(spans) == 4 * 4 * 2
    for (stage, kind, m), span in ran.items():
        needed = (stage - 1, kind, m) if kind is Kind.F else (stage + 1, kind, m)
        if needed in ran:
            assert span.start_s >= ran[needed].end_s
    assert 0 <= bubble_fraction(first) < 1
    assert makespan(first) > 0
    assert peak_memory(first) == (5, 3)


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("no targets", {"inputs": torch.ones(8, 4)}, "targets are missing"),
    ("no inputs", {"targets": torch.ones(8, 4)}, "inputs are missing"),
    ("few rows", {"inputs": torch.ones(3, 4), "targets": torch.ones(3, 4)}, "3 rows for 4"),
    (
        "unlike rows",
        {"inputs": torch.ones(8, 4), "targets": torch.ones(9, 4)},
        "8 rows, targets has 9",
    ),
    (
        "short list",
        {"inputs": [torch.ones(2, 4)] * 3, "targets": torch.ones(8, 4)},
        "list of 3 microbatches",
    ),
    (
        "bad kind",
        {"inputs": (torch.ones(8, 4), {1}), "targets": torch.ones(8, 4)},
        r"inputs\[1\] is a builtins.set",
    ),
    (
        "normaliser",
        {"inputs": torch.ones(8, 4), "targets": torch.ones(8, 4), "normaliser": 0},
        "normaliser is 0",
    ),
]


def misuse(rank: int, group: Any) -> list[list[str]]:
    """One rank at a time makes the mistake; the engine still works after each."""
    engine = toy_engine(rank, group, one_f_one_b(num_ranks=2, num_microbatches=4))
    good = dict(zip(("inputs", "targets"), toy_batch(8), strict=True))
    told = []
    for _, bad, _ in ERRORS:
        try:
            engine.step(**bad)
        except InputError as error:
            told.append(str(error))
        else:
            told.append("nothing was raised")
    try:
        engine.step(**(good if rank == 0 else {"inputs": None}))
    except InputError as error:
        told.append(str(error))
    assert all(p.grad is None for stage in engine.stages.values() for p in stage.parameters())
    loss = engine.step(**good).loss.item()
    engine.close()
    return [told, loss]


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_bad_batches_are_refused_on_every_rank_and_nothing_is_lost(transport: str) -> None:
    """Each rank gets the error, no gradient appears, and the next good step is right."""
    answers = run_ranks(misuse, 2, transport=transport)
    for told, loss in answers:
        for (name, _, expected), text in zip(ERRORS, told, strict=False):
            assert torch.tensor(loss).item() == pytest.approx(0.5520371942587701), name
            assert re.search(expected, text), (name, text)
    assert "rank 1 refused the step: targets are missing" in answers[0][0][-1]


def test_engines_refuse_wrong_stages_groups_and_schedules() -> None:
    """What does not fit is named at construction."""
    schedule = one_f_one_b(num_ranks=1, num_microbatches=2)
    with pytest.raises(InputError, match=r"was given the stages \[0, 1\].*owns \[0\]"):
        Engine({0: nn.Identity(), 1: nn.Identity()}, schedule)
    with pytest.raises(InputError, match="group is a str"):
        Engine({0: nn.Identity()}, schedule, group="pp")
    with pytest.raises(InputError, match="1 ranks, the schedule 2"):
        Engine({0: nn.Identity()}, one_f_one_b(num_ranks=2, num_microbatches=2))
    broken = parse_orders("0F0 0B0 0B1 0F1", placement=custom([0]))
    with pytest.raises(ScheduleError, match="0B1"):
        Engine({0: nn.Identity()}, broken)
    with pytest.raises(InputError, match="does not run 0I0 yet"):
        Engine({0: nn.Identity()}, parse_orders("0F0 0I0 0W0"))


def test_ranks_with_different_schedules_are_told_at_construction() -> None:
    """The disagreement is an error on every rank."""

    def work(rank: int, group: Any) -> str:
        schedule = one_f_one_b(num_ranks=2, num_microbatches=4 + rank)
        try:
            toy_engine(rank, group, schedule)
        except InputError as error:
            return str(error)
        return "nothing was raised"

    for text in run_ranks(work, 2):
        assert "do not agree on the schedule (rank 0: " in text


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third microbatch is odd")
        return h * 1


def fail(rank: int, group: Any) -> list[Any]:
    """What a step raises whose second stage breaks, and the bits of the next ones."""
    schedule = one_f_one_b(num_ranks=2, num_microbatches=4)
    torch.manual_seed(rank)
    module = nn.Linear(4, 4) if rank == 0 else Breaks()
    told: list[Any] = []
    for _ in range(2):
        engine = Engine({rank: module}, schedule, loss_fn=MSE, group=group, step_timeout_s=20)
        module.zero_grad()
        try:
            told.append(engine.step(torch.ones(8, 4), torch.ones(8, 4)).loss.item())
        except (StageError, RemoteError) as error:
            told.append(f"{type(error).__name__}: {error}")
            module.zero_grad()
            told.append(engine.step(torch.ones(8, 4), torch.ones(8, 4)).loss.item())
        told.append([parameter.grad.tolist() for parameter in module.parameters()])
        engine.close()
    return told


@pytest.mark.parametrize("transport", ["threads", "sockets", "gloo"])
def test_an_exception_in_a_stage_ends_the_step_on_every_rank(transport: str) -> None:
    """The error names rank, stage, microbatch and action; the next step is a fresh engine's."""
    for rank, told in enumerate(run_ranks(fail, 2, timeout_s=30, transport=transport)):
        text, *after_the_error = told[:3]
        assert text == (
            f"{'StageError' if rank == 1 else 'RemoteError'}: rank 1: 1F2 (stage 1, microbatch 2) "
            "raised ValueError: the third microbatch is odd"
        )
        assert after_the_error == told[3:]


def test_two_engines_live_side_by_side() -> None:
    """Engines of one group do not mix their messages, whatever the order of their steps."""

    def work(rank: int, group: Any) -> list[float]:
        small = toy_engine(rank, group, one_f_one_b(num_ranks=2, num_microbatches=2))
        large = toy_engine(rank, group, build("gpipe", num_ranks=2, num_microbatches=5))
        return [
            one.step(*toy_batch(rows)).loss.item()
            for one, rows in ((small, 8), (large, 10), (small, 8), (large, 10))
        ]

    expected = [0.5520371942587701, 0.5855505476851043] * 2
    for losses in run_ranks(work, 2):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_loss_is_delivered_to_every_rank_or_to_its_owner_only() -> None:
    """Where it is not asked for it is None, never a number."""

    def work(rank: int, group: Any) -> list[Any]:
        schedule = one_f_one_b(num_ranks=2, num_microbatches=4)
        losses = []
        for deliver in (True, False):
            engine = toy_engine(rank, group, schedule, deliver_loss=deliver)
            result = engine.step(*toy_batch(8))
            assert result.loss_rank == engine.loss_rank == 1
            losses.append(None if result.loss is None else round(result.loss.item(), 6))
        return losses

    assert run_ranks(work, 2) == [[0.552037, None], [0.552037, 0.552037]]


def test_a_normaliser_reaches_the_loss_before_backward() -> None:
    """A sum of squares divided by 32 gives the mean's loss and gradients, not 32 times those."""

    def work(rank: int, group: Any) -> tuple[float, float]:
        schedule = one_f_one_b(num_ranks=2, num_microbatches=4)
        stages = split(toy_layers(2), schedule, rank=rank)

        def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return ((output - target) ** 2).sum()

        engine = Engine(stages, schedule, loss_fn=summed, group=group)
        loss = engine.step(*toy_batch(8), normaliser=32).loss.item()
        return loss, engine.clip_grad_norm_(1e9).item()

    for loss, norm in run_ranks(work, 2):
        assert loss == pytest.approx(0.43112814594220417, rel=1e-12)
        assert norm == pytest.approx(0.7729067674697913, rel=1e-12)


def test_hub_groups_of_wrong_size_are_named() -> None:
    """A group must have as many ranks as the schedule."""
    group = InProcessHub(1).group(0)
    with pytest.raises(InputError, match="1 ranks, the schedule 2"):
        Engine({0: nn.Identity()}, one_f_one_b(num_ranks=2, num_microbatches=2), group=group)


def test_one_stage_can_be_run_by_itself() -> None:
    """A rank's own stage runs on any value; another's is refused by name."""
    schedule = build("looped_bfs", num_ranks=1, num_microbatches=2, stages_per_rank=4)
    engine = toy_engine(0, None, schedule)
    inputs, _ = toy_batch(3)
    value = inputs
    for stage in range(4):
        value = engine.run_stage(stage, value)
    assert same_bits(value, nn.Sequential(*toy_layers(4))(inputs))
    with pytest.raises(InputError, match=r"has no stage 4; its stages are \[0, 1, 2, 3\]"):
        engine.run_stage(4, value)


def test_the_engine_says_at_its_start_what_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Rank, stages, microbatches and transport are logged once."""
    with caplog.at_level("INFO", logger="stretto"):
        toy_engine(0, None, build("looped_bfs", num_ranks=1, num_microbatches=2, stages_per_rank=4))
    assert caplog.messages == [
        "rank 0 of 1: stages [0, 1, 2, 3] of 4, 2 microbatches, over LocalTransport"
    ]
