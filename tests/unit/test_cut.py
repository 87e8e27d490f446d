"""Where another engine may go on: behind whole letters, with the text that was held back, and not
in a stop string.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.serving.dispatch.cut import Cut, find_cut
from pdproxy.transfer.continued_events import LastEvent
from pdproxy.wire.continuable import Continuable, NotContinued
from pdproxy.wire.route import Route
from pdproxy_lab.sim.api.detokenizer import Detokenizer
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer

TOKENIZER = BuiltInTokenizer()


def event(text: str, ids: Sequence[int]) -> LastEvent:
    """The last event that a client was sent, as its engine sent it."""
    choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": list(ids)}
    shown = {
        "id": "a",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return LastEvent(b"data: " + json.dumps(shown).encode() + b"\n\n")


def kept(*stops: str, shows: bool = False) -> Continuable:
    """What is kept of a request with these stop strings."""
    return Continuable(Route.COMPLETIONS, "m", b"{}", 99, 0, stops, shows, False)


class Engine:
    """An engine's `/detokenize`: how often it was asked."""

    def __init__(self, *, fails: bool = False) -> None:
        self.asked: list[list[int]] = []
        self._fails = fails

    async def text(self, ids: Sequence[int]) -> str | None:
        self.asked.append(list(ids))
        return None if self._fails else TOKENIZER.decode(ids, skip_special_tokens=False)


def said(
    ids: Sequence[int], per_event: Sequence[int], stops: Sequence[str], *, shows: bool
) -> tuple[str, LastEvent] | None:
    """What an engine has sent of some ids, cut into events; and its last event. None: it has ended
    before.
    """
    detokenizer = Detokenizer(TOKENIZER, stops, include_stop=shows)
    sent, last, at = "", None, 0
    for count in per_event:
        part = ids[at : at + count]
        at += count
        if not part:
            break
        if detokenizer.add(part, stopped=False) is not None:
            return None
        text = detokenizer.take(finished=False)
        sent, last = sent + text, event(text, part)
    return (sent, last) if last is not None else None


LETTERS = st.text(st.sampled_from("ab \u00e9\u20ac\U0001f98aE"), min_size=1, max_size=12)


@given(LETTERS, st.data(), st.sampled_from([(), ("EE",), ("aEb", "E"), ("x" * 9,)]), st.booleans())
async def test_what_was_sent_and_held_is_the_text_of_the_ids(
    text: str, data: st.DataObject, stops: tuple[str, ...], shows: bool
) -> None:
    """However the ids come in events, wherever it is cut: nothing is missing and nothing comes
    twice. Or a reason is given.
    """
    ids = TOKENIZER.encode(text)
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=len(ids), max_size=len(ids)))
    made = said(ids, sizes, stops, shows=shows)
    if made is None:
        return
    sent, last = made
    engine = Engine()
    found = await find_cut(array("I", ids), last, kept(*stops, shows=shows), engine.text)
    if found == Cut(0):
        assert not sent
        return
    whole = TOKENIZER.decode(ids).rstrip("\ufffd")
    pending = any(whole.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
    if pending:
        assert found is NotContinued.STOP_PENDING
        return
    assert isinstance(found, Cut)
    assert sent + found.held == whole == TOKENIZER.decode(ids[: found.done])
    assert len(ids) - found.done < 4
    assert len(engine.asked) <= 4


async def test_one_id_with_text_asks_nobody() -> None:
    """Nearly all cuts are such: the text of whole letters was sent with its last id."""
    engine = Engine()
    ids = TOKENIZER.encode("to be")
    assert await find_cut(array("I", ids), event(" be", ids[-1:]), kept(), engine.text) == Cut(
        len(ids)
    )
    assert await find_cut(array("I", ids), event(" be", ids[-1:]), kept("E"), engine.text) == Cut(
        len(ids)
    )
    assert not engine.asked


async def test_a_parser_may_send_the_text_of_an_id_later() -> None:
    """So the text is compared: what it holds back would be lost."""
    ids = TOKENIZER.encode("to be <")
    for text, found in (
        (" <", Cut(len(ids))),
        (" ", NotContinued.HALF_LETTER),
        (" be", NotContinued.HALF_LETTER),
    ):
        engine = Engine()
        assert (
            await find_cut(
                array("I", ids), event(text, ids[-1:]), kept(), engine.text, is_parsed=True
            )
            == found
        )
        assert len(engine.asked) == 1


@pytest.mark.parametrize("stops", [("E" * 4,), ("E" * 4, "x")])
async def test_a_special_token_has_no_text(stops: tuple[str, ...]) -> None:
    """An engine tells its name, of which nothing was held back from the client."""
    ids = [*TOKENIZER.encode("to be or not"), 3]
    found = await find_cut(array("I", ids), event("", ids[-1:]), kept(*stops), Engine().text)
    assert found is NotContinued.HALF_LETTER
    assert await find_cut(array("I", ids), event("", ids[-1:]), kept(), Engine().text) == Cut(
        len(ids)
    )


async def test_an_answer_of_which_all_is_held_back_begins_anew() -> None:
    """A tokenizer may leave out the space at its beginning."""
    ids = TOKENIZER.encode(" to")
    found = await find_cut(array("I", ids), event("", ids[-1:]), kept("E" * 9), Engine().text)
    assert found == Cut(0)


async def test_nothing_was_sent_yet() -> None:
    """No ids: the answer begins; or its engine sends none."""
    engine = Engine()
    assert await find_cut(array("I"), event("", []), kept(), engine.text) == Cut(0)
    assert await find_cut(array("I"), event("x", []), kept(), engine.text) is NotContinued.NO_IDS
    begun = TOKENIZER.encode("\U0001f98a")[:3]
    assert await find_cut(array("I", begun), event("", begun[-1:]), kept(), engine.text) == Cut(0)


@pytest.mark.parametrize(
    ("ids", "last", "engine"),
    [
        (TOKENIZER.encode("a b"), event("", [9]), Engine(fails=True)),
        (TOKENIZER.encode("a b"), event("other", [9, 9]), Engine()),
        (TOKENIZER.encode("a b c d e f g h") * 9, event("other", [9, 9]), Engine()),
        ([200] * 9, event("", [9]), Engine()),
    ],
    ids=["nobody tells", "another text", "another long text", "no letters"],
)
async def test_what_is_not_known_is_not_guessed(
    ids: list[int], last: LastEvent, engine: Engine
) -> None:
    """Then the stream ends with an error."""
    assert await find_cut(array("I", ids), last, kept(), engine.text) is NotContinued.HALF_LETTER
    assert len(engine.asked) <= 4


async def test_a_window_is_asked_for_not_the_whole_answer() -> None:
    """The text of thousands of ids would not be short."""
    engine = Engine()
    ids = TOKENIZER.encode("to be or not to be " * 500)
    found = await find_cut(array("I", ids), event(" be ", ids[-2:]), kept(), engine.text)
    assert found == Cut(len(ids))
    assert len(engine.asked[0]) < 40
