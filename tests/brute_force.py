"""An independent judge of tiny schedules: it tries every way in which ranks can move.

Written from the words of the rules alone, without the library's dependency rule, walk or verifier,
so that a mistake in those cannot hide here. Actions are read from their printed form.
"""

from __future__ import annotations

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
