"""Actions: their spelling, both ways, and what is no action."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ActionSyntaxError, InputError
from stretto.ir import Action, Kind, Overlap, StageAction, StageKind, halves, parse_action
from stretto.ir.action import TRANSFERS

INDEX = st.integers(0, 10**6)
SINGLE = st.builds(Action, INDEX, st.sampled_from(Kind), INDEX)
SKIPPING = st.builds(Action, INDEX, st.sampled_from(sorted(TRANSFERS, key=str)), INDEX, INDEX)
WHOLE = st.builds(StageAction, INDEX, st.sampled_from(StageKind))
PAIR = st.builds(
    lambda s, m, t, n, kind: Overlap(Action(s, Kind.F, m), Action(t + s + 1, kind, n)),
    INDEX,
    INDEX,
    INDEX,
    INDEX,
    st.sampled_from([Kind.B, Kind.I]),
)


@given(st.one_of(SINGLE, SKIPPING, WHOLE, PAIR))
def test_actions_print_and_parse_to_themselves(action: object) -> None:
    """Every kind survives being written and read, with equality and hash by value."""
    again = parse_action(str(action))
    assert again == action
    assert hash(again) == hash(action)


def test_the_spelling_is_the_fields() -> None:
    """Stage, kind, microbatch; pairs and whole stages as torch writes them."""
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert str(Action(0, Kind.SEND_F, 2, 3)) == "0SEND_F2@3"
    pair = Overlap(Action(0, Kind.F, 7), Action(7, Kind.B, 3))
    assert str(pair) == "(0F7;7B3)OVERLAP_F_B"
    assert halves(pair) == (Action(0, Kind.F, 7), Action(7, Kind.B, 3))
    assert str(StageAction(0, StageKind.UNSHARD)) == "0UNSHARD"
    assert repr(Action(2, Kind.F, 0)) == "Action(stage=2, kind=F, microbatch=0)"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2X0",
        "2f0",
        "-1F0",
        "2F0 3F0",
        "0UNSHARD3",
        "2F0@1",
        "(0F7)OVERLAP_F_B",
        "(0F7;0UNSHARD)OVERLAP_F_B",
        "(0F7;7B3)",
        "2SEND_F",
    ],
)
def test_other_texts_are_refused_with_the_text(text: str) -> None:
    """The message quotes what was read and says what is wrong."""
    with pytest.raises(ActionSyntaxError, match="is not an action") as caught:
        parse_action(text)
    assert caught.value.text in (text, *text.strip("()").split(";"), text[1:5])


def test_pairs_need_a_forward_and_a_backward_of_other_work() -> None:
    """Two forwards, or a microbatch with its own backward on one stage, are no pair."""
    with pytest.raises(InputError, match="halves must be an F and a B"):
        Overlap(Action(0, Kind.F, 0), Action(1, Kind.F, 0))
    with pytest.raises(InputError, match="its own forward to be over"):
        Overlap(Action(0, Kind.F, 0), Action(0, Kind.B, 0))


def test_indices_count_from_zero_and_only_transfers_have_peers() -> None:
    """Negative indices and peers of compute actions are refused."""
    with pytest.raises(InputError, match="cannot be negative"):
        Action(-1, Kind.F, 0)
    with pytest.raises(InputError, match="only transfers have a peer"):
        Action(0, Kind.F, 0, 2)
