"""What the next prompt of a conversation may use of the turn before, by what its client has kept of
the answer.
"""

from __future__ import annotations

import pytest

from pdproxy.transfer.kept_turn import scope_of
from tests.unit.test_kept_turns import Shelf

ASKED = tuple(range(100, 164))
"""The prompt of the first turn: four blocks."""
THOUGHT = tuple(range(200, 220))
SHOWN = tuple(range(300, 312))
MORE = tuple(range(400, 420))
TURN = (*ASKED, *THOUGHT, *SHOWN)
EDITS = {
    "it goes on": ((*TURN, *MORE), 95),
    "it goes on with one token": ((*TURN, 7), 95),
    "nothing follows": (TURN, 95),
    "its thoughts are left out": ((*ASKED, *SHOWN, *MORE), 64),
    "its answer is left out": ((*ASKED, *THOUGHT, *MORE), 80),
    "a call of a tool is written otherwise": (
        (*ASKED, *THOUGHT, *SHOWN[:4], 9, *SHOWN[5:], *MORE),
        80,
    ),
    "its last token differs": ((*TURN[:-1], 9, *MORE), 95),
    "the token before differs": ((*TURN[:-2], 9, TURN[-1], *MORE), 80),
    "the question is asked again": (ASKED, 48),
    "another answer is wanted": ((*ASKED, *MORE), 64),
    "the question is edited": ((*ASKED[:40], 9, *ASKED[41:], *THOUGHT, *SHOWN, *MORE), 32),
    "the system's text is edited": ((9, *TURN[1:], *MORE), None),
    "its beginning was cut off": ((*TURN[16:], *MORE), None),
    "another conversation": (tuple(range(900, 990)), None),
    "less than a block": (TURN[:12], None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_only_tokens_that_are_the_same_are_used(edit: str) -> None:
    """Ids are compared, not texts: of what an answer hid from its client nobody needs to know."""
    prompt, tokens = EDITS[edit]
    shelf = Shelf()
    assert shelf.put("turn", *TURN)
    assert shelf.take(*prompt) == (None if tokens is None else ("turn", tokens))
    assert len(shelf.kept) == (tokens is None), "it is given once; what is of no use here stays"


@pytest.mark.parametrize("edit", EDITS)
def test_of_another_model_or_salt_nothing_is_used(edit: str) -> None:
    shelf = Shelf()
    shelf.put("turn", *TURN)
    for scope in (scope_of("other", b""), scope_of("tiny", b"salt")):
        assert shelf.take(*EDITS[edit][0], scope=scope) is None
    assert len(shelf.kept) == 1


@pytest.mark.parametrize(
    ("passed", "used"), [(0.0, True), (59.0, True), (100.0, False), (1e6, False)]
)
def test_a_turn_is_used_as_long_as_its_time_lasts(passed: float, used: bool) -> None:
    """Counted from its receipt here: the clock of the engine that keeps it may be any."""
    shelf = Shelf()
    shelf.put("turn", *TURN)
    shelf.at += passed
    assert (shelf.take(*TURN, *MORE) is not None) == used
    assert shelf.reasons == ([] if used else [("turn", "expired")])


def test_turns_that_nobody_continues_end_with_their_time() -> None:
    """Whatever is asked next: until then the decode engine may still have their blocks."""
    shelf = Shelf()
    shelf.put("turn", *TURN)
    shelf.at += 50
    shelf.put("later", *range(600, 690))
    shelf.at += 50
    assert shelf.take(*range(900, 990)) is None
    assert shelf.reasons == [("turn", "expired")]
    assert len(shelf.kept) == 1


def test_of_two_the_one_with_more_in_common_is_used() -> None:
    shelf = Shelf()
    shelf.put("short", *TURN[:70])
    shelf.put("long", *TURN)
    assert shelf.take(*TURN, *MORE) == ("long", 95)
    assert shelf.take(*TURN, *MORE) == ("short", 69)
