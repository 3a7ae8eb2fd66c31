"""An independent judge of tiny schedules: it tries every way in which ranks can move.

Written from the words of the rules alone, without the library's dependency rule, walk or verifier,
so that a mistake in those cannot hide here. Actions are read from their printed form.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache

Order = tuple[tuple[str, ...], ...]
"""Printed actions per rank."""

_FORM = re.compile(r"(\d+)([A-Z_]+)(\d+)")


def split(word: str) -> tuple[int, str, int]:
    """Stage, kind and microbatch of a printed action."""
    match = _FORM.fullmatch(word)
    assert match is not None, word
    return int(match[1]), match[2], int(match[3])


def is_complete(orders: Order, rank_of_stage: tuple[int, ...], m: int) -> bool:
    """Every stage and microbatch has one F and one B, or one I and one W, on its rank."""
    placed: dict[tuple[int, int], list[str]] = {}
    for rank, order in enumerate(orders):
        for word in order:
            stage, kind, microbatch = split(word)
            if kind in "FBIW":
                if rank_of_stage[stage] != rank:
                    return False
                placed.setdefault((stage, microbatch), []).append(kind)
    every = [(stage, i) for stage in range(len(rank_of_stage)) for i in range(m)]
    if all(placed.get(key) == ["F"] for key in every):
        return True
    return all("".join(sorted(placed.get(key, []))) in ("BF", "FIW") for key in every)


def transfers_fit(orders: Order, rank_of_stage: tuple[int, ...], m: int) -> bool:
    """The sends, receives and frees are exactly those that must be, on their ranks."""
    has_backward = any(split(word)[1] in "BI" for order in orders for word in order)
    due: set[tuple[int, str]] = set()
    for low in range(len(rank_of_stage) - 1):
        left, right = rank_of_stage[low], rank_of_stage[low + 1]
        for i in range(m):
            if left != right:
                due |= {(left, f"{low}SEND_F{i}"), (right, f"{low + 1}RECV_F{i}")}
                due |= {(left, f"{low}FREE_F{i}")}
                if has_backward:
                    due |= {(right, f"{low + 1}SEND_B{i}"), (left, f"{low}RECV_B{i}")}
                    due |= {(right, f"{low + 1}FREE_B{i}")}
    found = [
        (rank, word)
        for rank, order in enumerate(orders)
        for word in order
        if split(word)[1] not in "FBIW"
    ]
    return len(found) == len(due) and set(found) == due


def can_end(orders: Order, rank_of_stage: tuple[int, ...], rule: str) -> bool:
    """Whether some way of moving brings every rank to its end, under a rule of sending.

    Args:
        orders: Printed actions per rank; with transfers for a real rule.
        rank_of_stage: Owner of each stage.
        rule: `free` (no transfers: values are everywhere at once), `buffered`, `rendezvous` or
            `blocking`.
    """
    last = len(rank_of_stage) - 1

    def done(state: tuple[int, ...]) -> set[str]:
        return {word for rank, at in enumerate(state) for word in orders[rank][:at]}

    def arrived(state: tuple[int, ...], receive: str) -> bool:
        """Whether the message of a posted receive is there."""
        stage, kind, i = split(receive)
        sender = stage - 1 if kind == "RECV_F" else stage + 1
        send = f"{sender}{'SEND_F' if kind == 'RECV_F' else 'SEND_B'}{i}"
        here, there = rank_of_stage[stage], rank_of_stage[sender]
        posted = [w for w in orders[here][: state[here]] if same_channel(w, receive)]
        sent = [w for w in orders[there][: state[there]] if same_channel(w, send)]
        if receive not in posted:
            return False
        index = posted.index(receive)
        # tagless and in order: the n-th receive of a channel gets its n-th message
        return index < len(sent) and sent[index] == send

    def same_channel(word: str, like: str) -> bool:
        stage, kind, _ = split(word)
        other_stage, other_kind, _ = split(like)
        if kind != other_kind:
            return False
        step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[kind]
        ends = rank_of_stage[stage], rank_of_stage[stage + step]
        return ends == (rank_of_stage[other_stage], rank_of_stage[other_stage + step])

    def is_ready(state: tuple[int, ...], rank: int, word: str) -> bool:
        stage, kind, i = split(word)
        before = done(state)
        mine = set(orders[rank][: state[rank]])
        pool = before if rule == "free" else mine

        def has(neighbour: int, kinds: str, receive: str) -> bool:
            if any(f"{neighbour}{one}{i}" in pool for one in kinds):
                return True
            return rule != "free" and receive in mine and arrived(state, receive)

        if kind == "F":
            return stage == 0 or has(stage - 1, "F", f"{stage}RECV_F{i}")
        if kind in ("B", "I"):
            has_forward = f"{stage}F{i}" in mine
            return has_forward and (stage == last or has(stage + 1, "BI", f"{stage}RECV_B{i}"))
        if kind == "W":
            return f"{stage}I{i}" in mine
        if kind == "SEND_F":
            return (
                f"{stage}F{i}" in mine
                and f"{stage}FREE_F{i}" not in mine
                and (rule != "blocking" or can_leave(state, rank, word))
            )
        if kind == "SEND_B":
            has_gradient = f"{stage}B{i}" in mine or f"{stage}I{i}" in mine
            return (
                has_gradient
                and f"{stage}FREE_B{i}" not in mine
                and (rule != "blocking" or can_leave(state, rank, word))
            )
        if kind in ("FREE_F", "FREE_B"):
            return f"{stage}SEND_{kind[-1]}{i}" in mine
        return True

    def can_leave(state: tuple[int, ...], rank: int, send: str) -> bool:
        """A blocking send: its receive is posted and heads the channel."""
        stage, kind, i = split(send)
        target = stage + 1 if kind == "SEND_F" else stage - 1
        there = rank_of_stage[target]
        receive = f"{target}RECV_{kind[-1]}{i}"
        posted = [w for w in orders[there][: state[there]] if same_channel(w, receive)]
        sent = [w for w in orders[rank][: state[rank]] if same_channel(w, send)]
        return len(posted) > len(sent) and posted[len(sent)] == receive

    def moves(state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for rank, at in enumerate(state):
            if at < len(orders[rank]) and is_ready(state, rank, orders[rank][at]):
                yield (*state[:rank], at + 1, *state[rank + 1 :])

    @cache
    def ends(state: tuple[int, ...]) -> bool:
        if all(at == len(order) for at, order in zip(state, orders, strict=True)):
            if rule == "free":
                return True
            receives = (w for order in orders for w in order if "RECV" in w)
            return all(arrived(state, word) for word in receives)
        return any(ends(after) for after in moves(state))

    return ends((0,) * len(orders))


def is_legal(orders: Order, rank_of_stage: tuple[int, ...], m: int, rule: str) -> bool:
    """Complete, and able to end; under a real rule with the right transfers and frees."""
    if not is_complete(orders, rank_of_stage, m):
        return False
    if rule == "free":
        return can_end(orders, rank_of_stage, rule)
    return transfers_fit(orders, rank_of_stage, m) and can_end(orders, rank_of_stage, rule)


def ends_in_units(
    orders: Order, rank_of_stage: tuple[int, ...], sharing: str, batched: bool, draw: random.Random
) -> bool:
    """Whether ranks that hand units to shared communicators end, moving in a random order.

    Args:
        orders: Printed actions per rank, with the right transfers.
        rank_of_stage: Owner of each stage.
        sharing: `per_channel`, `per_direction` or `shared`.
        batched: Whether a unit holds all transfers between two compute actions, or one.
        draw: Chooses among the moves that are possible.
    """
    last = len(rank_of_stage) - 1

    def ends_of(word: str) -> tuple[int, int]:
        stage, kind, _ = split(word)
        other = stage + {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[kind]
        here, there = rank_of_stage[stage], rank_of_stage[other]
        return (here, there) if "SEND" in kind else (there, here)

    def communicator(word: str) -> object:
        direction = split(word)[1][-1]
        if sharing == "per_channel":
            return (*ends_of(word), direction)
        return direction if sharing == "per_direction" else "all"

    def units_of(order: tuple[str, ...]) -> list[list[tuple[int, str]]]:
        found: list[list[tuple[int, str]]] = []
        mine: dict[object, list[tuple[int, str]]] = {}
        for at, word in enumerate(order):
            kind = split(word)[1]
            if kind in "FBIW":
                mine = {}
            elif "FREE" not in kind:
                if not batched or communicator(word) not in mine:
                    mine[communicator(word)] = []
                    found.append(mine[communicator(word)])
                mine[communicator(word)].append((at, word))
        return found

    units = [units_of(order) for order in orders]
    at = [0] * len(orders)
    over: set[str] = set()

    def can_pass(rank: int) -> bool:
        stage, kind, i = split(orders[rank][at[rank]])
        before = orders[rank][: at[rank]]

        def has(neighbour: int, kinds: str, receive: str) -> bool:
            made_here = any(f"{neighbour}{one}{i}" in before for one in kinds)
            return made_here or (receive in before and receive in over)

        if kind == "F":
            return stage == 0 or has(stage - 1, "F", f"{stage}RECV_F{i}")
        if kind in ("B", "I"):
            gradient = stage == last or has(stage + 1, "BI", f"{stage}RECV_B{i}")
            return f"{stage}F{i}" in before and gradient
        if kind == "W":
            return f"{stage}I{i}" in before
        if "RECV" in kind:
            return True
        if "FREE" in kind:
            return f"{stage}SEND_{kind[-1]}{i}" in before
        made = ("F",) if kind == "SEND_F" else ("B", "I")
        is_made = any(f"{stage}{one}{i}" in before for one in made)
        return is_made and f"{stage}FREE_{kind[-1]}{i}" not in before

    def free_transfers() -> list[str]:
        """Of each communicator's first unit on a rank, the first transfer on each way."""
        found: list[str] = []
        for rank, mine in enumerate(units):
            for name in {communicator(unit[0][1]) for unit in mine}:
                waiting = [
                    unit
                    for unit in mine
                    if communicator(unit[0][1]) == name and any(w not in over for _, w in unit)
                ]
                if waiting and waiting[0][-1][0] < at[rank]:
                    first: dict[tuple[int, int], str] = {}
                    for _, word in waiting[0]:
                        if word not in over:
                            first.setdefault(ends_of(word), word)
                    found += first.values()
        return found

    while True:
        passing: list[object] = [
            rank for rank, order in enumerate(orders) if at[rank] < len(order) and can_pass(rank)
        ]
        free = free_transfers()
        meeting: list[object] = [
            (send, receive)
            for send in free
            for receive in free
            if "SEND" in send
            and "RECV" in receive
            and ends_of(send) == ends_of(receive)
            and communicator(send) == communicator(receive)
        ]
        moves = passing + meeting
        if not moves:
            transfers = {w for order in orders for w in order if "SEND" in w or "RECV" in w}
            return all(a == len(o) for a, o in zip(at, orders, strict=True)) and over == transfers
        move = draw.choice(moves)
        if isinstance(move, int):
            at[move] += 1
            continue
        assert isinstance(move, tuple)
        stage, kind, i = split(move[0])
        step = 1 if kind == "SEND_F" else -1
        if move[1] != f"{stage + step}RECV_{kind[-1]}{i}":
            return False  # without tags, a message has come to the wrong receive
        over.update(move)
