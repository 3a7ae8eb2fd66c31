"""Random mutations of random schedules, judged by the verifier and by brute force alike."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from brute_force import Order, ends_in_units, is_complete, is_legal, transfers_fit
from stretto.ir import Action, Communicators, Kind, Placement, Schedule, gives, needs, parse_action
from stretto.ir.placement import custom, loop, v
from stretto.passes import lower
from stretto.verify import Rule, verify
from stretto.verify.violation import WITHOUT_COMMUNICATORS

SIZES = ((1, 1, 2), (2, 1, 2), (2, 1, 3), (2, 2, 2), (3, 1, 2))
"""Ranks, stages per rank, microbatches."""


def random_schedule(draw: random.Random) -> Schedule:
    """Any order that can run, with whole and split backwards, on a small random placement."""
    p, v_stages, m = draw.choice(SIZES)
    placement = loop(num_ranks=p, stages_per_rank=v_stages)
    if v_stages == 2 and draw.random() < 0.5:
        placement = v(num_ranks=p)
    left: list[Action] = []
    for stage in range(placement.num_stages):
        for i in range(m):
            kinds = draw.choice(([Kind.F, Kind.B], [Kind.F, Kind.I, Kind.W]))
            left += [Action(stage, kind, i) for kind in kinds]
    orders: list[list[Action]] = [[] for _ in range(p)]
    there: set[object] = set()
    while left:
        ready = [a for a in left if all(x in there for x in needs(a, placement.num_stages))]
        action = draw.choice(ready)
        left.remove(action)
        there.update(gives(action))
        orders[placement.rank_of(action.stage)].append(action)
    return Schedule(
        placement=placement, num_microbatches=m, ranks=tuple(tuple(order) for order in orders)
    )


def mutate(draw: random.Random, orders: Order, placement: Placement, m: int) -> Order:
    """Drop, repeat, swap, move, hand to another rank, or rename one or two actions."""
    changed = [list(order) for order in orders]
    for _ in range(draw.choice((1, 1, 2))):
        rank = draw.choice([r for r, order in enumerate(changed) if order])
        order = changed[rank]
        at = draw.randrange(len(order))
        match draw.choice(("drop", "repeat", "swap", "move", "move", "rank", "rename")):
            case "drop":
                if sum(map(len, changed)) > 1:
                    del order[at]
            case "repeat":
                order.insert(draw.randrange(len(order) + 1), order[at])
            case "swap":
                other = draw.randrange(len(order))
                order[at], order[other] = order[other], order[at]
            case "move":
                order.insert(draw.randrange(len(order)), order.pop(at))
            case "rank":
                word = order.pop(at)
                target = changed[draw.randrange(len(changed))]
                target.insert(draw.randrange(len(target) + 1), word)
            case _:
                action = parse_action(order[at])
                assert isinstance(action, Action)
                stage = draw.randrange(placement.num_stages)
                order[at] = str(Action(stage, action.kind, draw.randrange(m)))
        if not any(changed):
            changed[rank] = list(orders[rank])
    return tuple(tuple(order) for order in changed)


def move_transfers(draw: random.Random, orders: Order) -> Order:
    """Move one to three transfers of a rank elsewhere in its order."""
    changed = [list(order) for order in orders]
    for _ in range(draw.choice((1, 2, 3))):
        order = draw.choice(changed)
        places = [at for at, word in enumerate(order) if "SEND" in word or "RECV" in word]
        if places:
            order.insert(draw.randrange(len(order)), order.pop(draw.choice(places)))
    return tuple(tuple(order) for order in changed)


def printed(schedule: Schedule) -> Order:
    """The orders as words."""
    return tuple(tuple(str(item) for item in order) for order in schedule.ranks)


def with_words(schedule: Schedule, orders: Order) -> Schedule:
    """The schedule with orders given as words."""
    return schedule.with_ranks(
        tuple(tuple(parse_action(word) for word in order) for order in orders)
    )


@pytest.mark.parametrize("part", range(4))
def test_mutated_schedules_are_judged_as_brute_force_does(part: int) -> None:
    """Of 400 mutants none is accepted that cannot run, and none refused that can."""
    verdicts: Counter[bool] = Counter()
    for seed in range(100):
        draw = random.Random(f"plain {part} {seed}")
        schedule = random_schedule(draw)
        owners = schedule.placement.replicas[0]
        for _ in range(4):
            orders = mutate(draw, printed(schedule), schedule.placement, schedule.num_microbatches)
            legal = is_legal(orders, owners, schedule.num_microbatches, "free")
            found = verify(with_words(schedule, orders))
            assert (not found) == legal, (orders, owners, [str(one) for one in found])
            verdicts[legal] += 1
    assert min(verdicts.values()) > 20, verdicts


@pytest.mark.parametrize("rule", [one.value for one in WITHOUT_COMMUNICATORS])
def test_mutated_programs_are_judged_as_brute_force_does(rule: str) -> None:
    """Of 300 mutants of lowered programs, likewise under each rule of sending."""
    verdicts: Counter[bool] = Counter()
    for seed in range(100):
        draw = random.Random(f"lowered {rule} {seed}")
        program = lower(random_schedule(draw))
        if not program.is_lowered:
            continue
        owners = program.placement.replicas[0]
        for _ in range(4):
            orders = mutate(draw, printed(program), program.placement, program.num_microbatches)
            mutant = with_words(program, orders)
            if not mutant.is_lowered:
                continue
            legal = is_legal(orders, owners, program.num_microbatches, rule)
            found = verify(mutant, transport=rule)
            assert (not found) == legal, (rule, orders, owners, [str(one) for one in found])
            verdicts[legal] += 1
    assert verdicts.total() >= 280
    assert min(verdicts.values()) > 20, verdicts


def test_orders_that_only_some_rules_allow_are_told_apart() -> None:
    """Two ranks that both send first: buffered sends pass, blocking ones do not."""
    left = "0F0 0SEND_F0 0FREE_F0 0F1 0SEND_F1 0FREE_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    right = "1RECV_F0 1F0 1B0 1SEND_B0 1FREE_B0 1RECV_F1 1F1 1B1 1SEND_B1 1FREE_B1"
    words = (tuple(left.split()), tuple(right.split()))
    schedule = with_words(
        Schedule(placement=custom([0, 1]), num_microbatches=2, ranks=((), ())), words
    )
    for rule, legal in (("buffered", True), ("rendezvous", True), ("blocking", False)):
        assert (not verify(schedule, transport=rule)) == legal
        assert is_legal(words, (0, 1), 2, rule) == legal


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("sharing", list(Communicators))
def test_mutated_programs_are_judged_as_brute_force_does_on_shared_communicators(
    sharing: Communicators, batched: bool
) -> None:
    """Of lowered programs and 180 mutants, for every way of sharing, batched and one by one."""
    verdicts: Counter[bool] = Counter()
    rules: Counter[Rule] = Counter()
    for seed in range(45):
        draw = random.Random(f"{sharing} {batched} {seed}")
        program = lower(random_schedule(draw), ahead=draw.choice((0, 1)))
        owners, m = program.placement.replicas[0], program.num_microbatches
        words = printed(program)
        moved = [move_transfers(draw, words) for _ in range(3)]
        for orders in (words, *moved, mutate(draw, words, program.placement, m)):
            mutant = with_words(program, orders)
            if not mutant.is_lowered:
                continue
            legal = is_complete(orders, owners, m) and transfers_fit(orders, owners, m)
            if legal:  # two ways of moving: which one is taken must not matter
                ends = {ends_in_units(orders, owners, sharing, batched, draw) for _ in range(2)}
                assert len(ends) == 1, (sharing, batched, orders, owners)
                (legal,) = ends
            found = verify(mutant, transport="nccl", communicators=sharing, batched=batched)
            assert (not found) == legal, (orders, owners, [str(one) for one in found])
            verdicts[legal] += 1
            rules.update({one.rule for one in found})
    assert verdicts.total() >= 150
    assert min(verdicts.values()) > 20, verdicts
    # where channels share nothing, few moves break more than the order of a channel
    enough = {"per_channel": 0, "per_direction": 4, "shared": 8}
    assert rules[Rule.DEADLOCK] >= enough[sharing], rules
