"""User functions around every forward and backward, in bubbles, and hooks of torch's own.

What goes wrong elsewhere: hooks belong to a class, so that two pipelines share them; they fire for
some schedules only, or once per step instead of once per microbatch; they are told the values of
another stage or microbatch; and what is to fill the bubbles runs at the wrong place, or not at all
when there are fewer functions than bubbles.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from every_schedule import every_schedule, flat, plain_toy, toy_depth, toy_engine, unequal
from reference import same_bits, toy_batch, toy_layers
from stretto.errors import InputError, StageError
from stretto.ir import Kind
from stretto.runtime import Engine, HookEvent
from stretto.schedules import build
from stretto.testing import run_ranks

MSE = nn.functional.mse_loss
LOCATIONS = ("before_forward", "after_forward", "before_backward", "after_backward")


def plain_values(depth: int, num_stages: int, m: int, step: int) -> dict[tuple[Any, ...], Any]:
    """What hooks of the toy model's stages are told, from one plain run per microbatch."""
    model = nn.Sequential(*toy_layers(depth))
    per_stage = depth // num_stages
    inputs, targets = toy_batch(8 + step)
    told: dict[tuple[Any, ...], Any] = {}
    for index, (x, t) in enumerate(
        zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
    ):
        values = [x]
        for stage in range(num_stages):
            h = values[-1].detach().requires_grad_(stage > 0)
            told["before_forward", stage, index] = h
            values[-1] = h
            for layer in model[stage * per_stage : (stage + 1) * per_stage]:
                h = layer(h)
            told["after_forward", stage, index] = h
            values.append(h)
        (MSE(values[-1], t) / (len(inputs) / len(x))).backward()
        gradient = None
        for stage in reversed(range(num_stages)):
            told["before_backward", stage, index] = gradient
            if gradient is not None:
                told["after_forward", stage, index].backward(gradient)
            gradient = told["before_forward", stage, index].grad if stage else None
            told["after_backward", stage, index] = gradient
    return told


def compare_events(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Order and contents of all events of two steps and an evaluation, and of two engines."""
    wrong: list[str] = []
    for name, schedule in every_schedule(num_ranks, 3):
        depth, p = toy_depth(schedule), schedule.num_stages
        if depth % p:
            continue
        engine, other = toy_engine(rank, group, schedule), toy_engine(rank, group, schedule)
        events: list[HookEvent] = []
        foreign: list[HookEvent] = []
        handles = [engine.register_hook(one, events.append) for one in LOCATIONS]
        other.register_hook("after_backward", foreign.append)
        expected = [
            (f"{place}_{way}", action.stage, action.microbatch)
            for action in schedule.actions(rank)
            for way in ("forward" if action.kind is Kind.F else "backward",)
            for place in ("before", "after")
        ]
        for step in range(2):
            events.clear()
            engine.step(*toy_batch(8 + step))
            if [(one.location, one.stage, one.microbatch) for one in events] != expected:
                wrong.append(f"{name}: events came in another order")
            if any(one.step != step or not one.train for one in events):
                wrong.append(f"{name}: events of step {step} say {events[0].step}")
            values = plain_values(depth, p, 3, step)
            for one in events:
                value = values[one.location, one.stage, one.microbatch]
                found = one.value
                if "backward" in one.location and found is not None:
                    (found,) = found
                if found is None or value is None:
                    is_same = found is value
                else:
                    is_same = same_bits(found, value)
                if not is_same:
                    wrong.append(f"{name}: {one.location} {one.stage} {one.microbatch}")
        events.clear()
        engine.eval_step(*toy_batch(7), num_microbatches=2)
        count = 2 * 2 * len(engine.stages)
        if [one.step for one in events] != [2] * count or any(one.train for one in events):
            wrong.append(f"{name}: {len(events)} events of an evaluation, not {count}")
        if any("backward" in one.location or one.value.requires_grad for one in events):
            wrong.append(f"{name}: an evaluation tells of backwards, or of gradients")
        if foreign:
            wrong.append(f"{name}: hooks of one engine heard of another")
        for handle in (*handles, *handles):
            handle.remove()
        events.clear()
        engine.step(*toy_batch(8))
        if events:
            wrong.append(f"{name}: removed hooks were called")
        engine.close()
        other.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_hooks_are_told_every_forward_and_backward_with_its_values(num_ranks: int) -> None:
    """Inputs, outputs and gradients of each stage and microbatch, in the schedule's order."""
    assert flat(run_ranks(compare_events, num_ranks, num_ranks, transport="sockets")) == []


def log_order(rank: int, group: Any) -> list[str]:
    """Several hooks of one place, one that takes itself away, and places that are not there."""
    engine = toy_engine(rank, group, build("one_f_one_b", num_ranks=2, num_microbatches=2))
    log: list[str] = []
    engine.register_hook("before_forward", lambda event: log.append(f"a{event.microbatch}"))

    def once(event: HookEvent) -> None:
        log.append(f"once{event.microbatch}")
        handle.remove()

    handle = engine.register_hook("before_forward", once)
    engine.register_hook("before_forward", lambda event: log.append(f"b{event.microbatch}"))
    engine.step(*toy_batch(4))
    try:
        engine.register_hook("between", once)
    except InputError as error:
        log.append(str(error))
    engine.close()
    return log


def test_hooks_of_one_place_run_in_the_order_they_were_given() -> None:
    """A hook may take itself away while it runs; an unknown place is refused."""
    for log in run_ranks(log_order, 2, transport="sockets"):
        assert log[:-1] == ["a0", "once0", "b0", "a1", "b1"]
        assert "no hook location 'between'; locations: before_forward" in log[-1]


def fill_bubbles(rank: int, group: Any, num_ranks: int) -> list[str]:
    """Where the functions for bubbles run, in every schedule that has a known number of them."""
    wrong: list[str] = []
    for name in ("gpipe", "one_f_one_b"):
        for m in (num_ranks, 2 * num_ranks):
            schedule = build(name, num_ranks=num_ranks, num_microbatches=m)
            engine = toy_engine(rank, group, schedule)
            if engine.num_bubbles != 2 * num_ranks - 2:
                wrong.append(f"{name}, m={m}: {engine.num_bubbles} bubbles")
            log: list[str] = []
            engine.register_hook("before_forward", lambda one, log=log: log.append("F"))
            engine.register_hook("before_backward", lambda one, log=log: log.append("B"))
            engine.set_bubble_hooks(
                [lambda i=i, log=log: log.append(str(i)) for i in range(engine.num_bubbles)]
            )
            for _ in range(2):
                log.clear()
                engine.step(*toy_batch(2 * m))
                slots = [one for one in log if one.isdigit()]
                if slots != [str(i) for i in range(2 * num_ranks - 2)]:
                    wrong.append(f"{name}, m={m}: bubbles ran as {slots}")
                before = log.index("F")
                after = len(log) - 1 - max(i for i, one in enumerate(log) if one == "B")
                if (before, after) != (rank, rank):
                    wrong.append(f"{name}, m={m}: {log}")
            log.clear()
            engine.eval_step(*toy_batch(2 * m))
            if any(one.isdigit() for one in log):
                wrong.append(f"{name}, m={m}: an evaluation filled bubbles of training")
            for count in (0, 2 * num_ranks - 3, 2 * num_ranks - 1):
                try:
                    if count >= 0 and count != engine.num_bubbles:
                        engine.set_bubble_hooks([lambda: None] * count)
                        wrong.append(f"{name}: {count} functions were taken")
                except InputError as error:
                    if f"{count} bubble hooks" not in str(error):
                        wrong.append(f"{name}: {error}")
            engine.set_bubble_hooks(None)
            log.clear()
            engine.step(*toy_batch(2 * m))
            if sorted(set(log)) != ["B", "F"]:
                wrong.append(f"{name}, m={m}: functions taken away ran")
            engine.close()
    for name, schedule in every_schedule(num_ranks, 3):
        engine = toy_engine(rank, group, schedule)
        called: list[int] = []
        hooks = [lambda i=i, called=called: called.append(i) for i in range(engine.num_bubbles)]
        engine.set_bubble_hooks(hooks)
        engine.step(*toy_batch(8))
        if called != list(range(engine.num_bubbles)):
            wrong.append(f"{name}: bubbles were filled as {called}")
        expected = plain_toy(toy_depth(schedule), 8, 3).gradients
        wrong += [f"{name}: {one}" for one in unequal(engine, expected)]
        engine.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_bubbles_are_filled_in_order_and_their_number_is_known(num_ranks: int) -> None:
    """2p - 2 of them, r before the first forward and r after the last backward of rank r."""
    assert flat(run_ranks(fill_bubbles, num_ranks, num_ranks, transport="sockets")) == []


def count_own_hooks(rank: int, group: Any) -> list[str]:
    """How often torch's own hooks of modules and parameters fire, and what they are told."""
    wrong: list[str] = []
    for name, schedule in every_schedule(2, 4):
        engine = toy_engine(rank, group, schedule)
        counts: dict[str, int] = {}

        def count(what: str, counts: dict[str, int] = counts) -> None:
            counts[what] = counts.get(what, 0) + 1

        parameters = [
            (f"{stage}.{key}", parameter)
            for stage, module in engine.stages.items()
            for key, parameter in module.named_parameters()
        ]
        for key, parameter in parameters:
            parameter.register_hook(lambda gradient, key=key, count=count: count(f"hook {key}"))
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, key=key, count=count: count(f"accumulated {key}")
            )
        for stage, module in engine.stages.items():
            module.register_forward_pre_hook(lambda *a, s=stage, count=count: count(f"pre {s}"))
            module.register_forward_hook(lambda *a, s=stage, count=count: count(f"post {s}"))
        engine.step(*toy_batch(8))
        expected = {f"{what} {key}": 4 for key, _ in parameters for what in ("hook", "accumulated")}
        expected |= {f"{what} {s}": 4 for s in engine.stages for what in ("pre", "post")}
        if counts != expected:
            wrong.append(f"{name}: {counts}")
        plain = plain_toy(toy_depth(schedule), 8, 4).gradients
        wrong += [f"{name}: {one}" for one in unequal(engine, plain)]
        engine.close()
    return wrong


def test_hooks_of_parameters_and_modules_fire_once_per_microbatch() -> None:
    """Gradient, post-accumulate and forward hooks fire as in the plain run, four times each."""
    assert flat(run_ranks(count_own_hooks, 2, transport="sockets")) == []


def break_hooks(rank: int, group: Any, location: str) -> str:
    """What a hook that raises on every rank leads to, and what an engine says afterwards."""
    schedule = build("one_f_one_b", num_ranks=2, num_microbatches=2)
    engine: Engine = toy_engine(rank, group, schedule)

    def raise_something(event: Any = None) -> None:
        raise ValueError("a hook does not like it")

    if location == "bubble":
        engine.set_bubble_hooks([raise_something] * engine.num_bubbles)
    else:
        engine.register_hook(location, raise_something)
    try:
        engine.step(*toy_batch(8))
    except StageError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}"
    return "nothing was raised"


@pytest.mark.parametrize("location", [*LOCATIONS, "bubble"])
def test_a_hook_that_raises_ends_the_step_by_name(location: str) -> None:
    """At least one rank names its action and the hook's own words; nobody hangs."""
    told = run_ranks(break_hooks, 2, location, transport="threads", timeout_s=20)
    assert any("ValueError: a hook does not like it" in text for text in told)
    assert "nothing was raised" not in told
