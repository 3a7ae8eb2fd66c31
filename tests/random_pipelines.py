"""Random models, schedules and batches, each a function of one seed, and their plain runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference import gradients_of, same_bits
from stretto.ir import Action, Kind, Placement, Schedule, gives, loop, needs
from stretto.ir.calling import WithSkips
from stretto.ir.placement import custom, v
from stretto.models import LayerSpec, build, split
from stretto.runtime import Engine, seeded_plain_run
from stretto.schedules import build as build_schedule


@dataclass
class Box:
    """A payload that is a dataclass."""

    h: torch.Tensor
    rest: Any


def opened(args: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    """The hidden state of any of the payloads."""
    if args and isinstance(args[0], Box):
        return args[0].h
    return keywords["h"] if "h" in keywords else args[0]


class RandomLayer(nn.Module):
    """One layer of a random model: work of some kind, and a payload of some form."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.plan = plan
        width, dtype = plan["width"], plan["dtype"]
        self.skip_outputs = tuple(plan["makes"])
        self.skip_inputs = tuple(plan["uses"])
        self.dropout = nn.Dropout(plan["dropout"])
        kinds: dict[str, Any] = {
            "linear": lambda: nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()),
            "norm": lambda: nn.LayerNorm(width, dtype=dtype),
            "mlp": lambda: nn.Sequential(
                nn.Linear(width, 2 * width + 1, dtype=dtype),
                nn.GELU(),
                nn.Linear(2 * width + 1, width, bias=False, dtype=dtype),
            ),
            "none": nn.SiLU,
            "in place": lambda: nn.ReLU(inplace=True),
        }
        self.work = kinds[plan["kind"]]()
        self.requires_grad_(not plan["frozen"])

    def forward(self, *args: Any, **keywords: Any) -> Any:
        h = opened(args, keywords)
        for name in self.skip_inputs:
            h = h + 0.5 * keywords[name]["value"]
        if self.plan["recompute"]:
            h = checkpoint(self._body, h, use_reentrant=False)
        else:
            h = self._body(h)
        output = self._packed(h)
        if self.skip_outputs:
            made = {name: {"value": h * (i + 1)} for i, name in enumerate(self.skip_outputs)}
            return WithSkips(output, made)
        return output

    def _body(self, h: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.work(h)) + (0 if self.plan["kind"] == "in place" else h)

    def _packed(self, h: torch.Tensor) -> Any:
        form = self.plan["form"]
        if form == "tuple":
            return h, h.detach() > 0, None, "tag"
        if form == "dict":
            return {"h": h, "pair": [torch.arange(h.shape[0]), (h.shape[1], 2.5)]}
        if form == "box":
            return Box(h, {"empty": torch.empty(0, 4), "const": torch.ones(3)})
        if form == "transposed":
            return h.transpose(0, 1).contiguous().transpose(0, 1)
        return h


class Opened(nn.Module):
    """The last layer: the hidden state alone."""

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        return opened(args, keywords)


def random_layers(draw: random.Random, count: int) -> tuple[list[LayerSpec], int, torch.dtype]:
    """Descriptions of a random model's layers, its width and dtype."""
    width = draw.choice([3, 5, 8])
    dtype = draw.choice([torch.float32, torch.float64])
    dropout = draw.choice([0.0, 0.0, 0.4])
    plans: list[dict[str, Any]] = [
        {
            "kind": draw.choice(["linear", "norm", "mlp", "none", "linear", "mlp", "in place"]),
            "form": draw.choice(["tensor", "tuple", "dict", "box", "transposed"]),
            "width": width,
            "dtype": dtype,
            "frozen": draw.random() < 0.15,
            "dropout": dropout,
            "recompute": draw.random() < 0.2,
            "makes": [],
            "uses": [],
        }
        for _ in range(count - 1)
    ]
    for number in range(draw.choice([0, 0, 1, 2])):
        layers = sorted(draw.sample(range(count - 1), min(count - 1, draw.choice([2, 3]))))
        if len(layers) > 1:
            plans[layers[0]]["makes"].append(f"skip{number}")
            for user in layers[1:]:
                plans[user]["uses"].append(f"skip{number}")
    for before, plan in zip([None, *plans], plans, strict=False):
        saved = before is not None and (before["kind"] == "in place" or before["makes"])
        if plan["kind"] == "in place" and (saved or plan["recompute"]):
            plan["kind"] = "none"  # plain autograd would refuse the change, too
    return [*(LayerSpec(RandomLayer, plan) for plan in plans), LayerSpec(Opened)], width, dtype


def random_schedule(draw: random.Random, num_ranks: int) -> Schedule:
    """A schedule of a random family and size, or a random order on a random placement."""
    m = draw.choice([1, 2, 3, 4, 5, 6, 8])
    name = draw.choice(["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "any", "any"])
    if name == "any":
        return random_order(draw, random_placement(draw, num_ranks), m)
    options = {}
    if name in ("interleaved_1f1b", "looped_bfs"):
        options["stages_per_rank"] = draw.choice([2, 3])
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=m, **options)


def random_placement(draw: random.Random, num_ranks: int) -> Placement:
    """A loop, a V, or stages dealt at random."""
    kind = draw.choice(["loop", "v", "custom"])
    if kind == "loop":
        return loop(num_ranks=num_ranks, stages_per_rank=draw.choice([1, 2]))
    if kind == "v":
        return v(num_ranks=num_ranks)
    owners = [*range(num_ranks), *(draw.randrange(num_ranks) for _ in range(draw.choice([0, 2])))]
    draw.shuffle(owners)
    return custom(owners)


def random_order(draw: random.Random, placement: Placement, m: int) -> Schedule:
    """Any order that can run, with the backwards of every stage ascending."""
    num_stages = placement.num_stages
    left = [
        Action(s, kind, i) for s in range(num_stages) for kind in (Kind.F, Kind.B) for i in range(m)
    ]
    there: set[Any] = set()
    orders: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    backwards = [0] * num_stages
    while left:
        ready = [
            action
            for action in left
            if all(value in there for value in needs(action, num_stages))
            and (action.kind is Kind.F or action.microbatch == backwards[action.stage])
        ]
        action = draw.choice(ready)
        left.remove(action)
        there.update(gives(action))
        backwards[action.stage] += action.kind is Kind.B
        orders[placement.rank_of(action.stage)].append(action)
    return Schedule(
        placement=placement, num_microbatches=m, ranks=tuple(tuple(order) for order in orders)
    )


def run_case(rank: int, group: Any, num_ranks: int, seed: int) -> list[str]:
    """One random pipeline against its plain run, two steps of other shapes; what differs."""
    draw = random.Random(f"{seed} of {num_ranks}")
    schedule = random_schedule(draw, num_ranks)
    layers, width, dtype = random_layers(draw, schedule.num_stages + draw.choice([1, 1, 3]))
    by = draw.choice(["even", "uniform_late"])
    plain = build(layers, seed=seed)
    stages = split(layers, schedule, rank=rank, by=by, seed=seed)
    loss_fn = nn.functional.mse_loss
    engine = Engine(stages, schedule, loss_fn=loss_fn, group=group, seed=seed)
    m = schedule.num_microbatches
    wrong: list[str] = []
    for step in range(2):
        rows, length = m * draw.choice([1, 2]) + draw.choice([0, 0, 1]), draw.choice([1, 3, 4])
        generator = torch.Generator().manual_seed(seed + step)
        shape = (rows, length, width)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        targets = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        total: torch.Tensor | None = None
        cuts = zip(inputs.clone().tensor_split(m), targets.tensor_split(m), strict=True)
        for microbatch, (x, t) in enumerate(cuts):
            with seeded_plain_run(plain, seed=seed, step=step, microbatch=microbatch):
                output = plain(x)
                output = output.output if isinstance(output, WithSkips) else output
                scaled = loss_fn(output, t) / (rows / x.shape[0])
                if scaled.requires_grad:
                    scaled.backward()
            total = scaled.detach() if total is None else total + scaled.detach()
        result = engine.step(inputs.clone(), targets)
        if result.loss is None or total is None or not same_bits(result.loss, total.double()):
            wrong.append(f"step {step}: loss {result.loss} != {total}")
        expected = gradients_of(plain)
        for stage in stages.values():
            found = gradients_of(stage)
            for name, parameter in stage.named_parameters():
                if (name in found) != (name in expected):
                    wrong.append(f"step {step}: {name} {name in found} {name in expected}")
                elif name in found and not same_bits(found[name], expected[name]):
                    wrong.append(f"step {step}: {name} {tuple(parameter.shape)}")
    norm = engine.clip_grad_norm_(0.1)
    parameters = [*plain.parameters()] or [nn.Parameter(torch.zeros(1))]
    if not same_bits(norm, nn.utils.clip_grad_norm_(parameters, 0.1)):
        wrong.append("norm")
    engine.close()
    return [f"seed {seed}, {num_ranks} ranks, rank {rank}: {one}" for one in wrong]


def run_cases(rank: int, group: Any, num_ranks: int, seeds: range) -> list[str]:
    """Many cases in one world of processes."""
    return [one for seed in seeds for one in run_case(rank, group, num_ranks, seed)]
