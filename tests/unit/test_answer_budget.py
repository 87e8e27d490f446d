"""The budget for what engines have sent: what counts in it, and until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.errors import AnswerBudgetError, AnswerTooLargeError, EngineError
from pdproxy.serving.stream.relay import Relay
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import Pending
from tests.fakes import answers


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_what_was_added_is_whole(parts: list[bytes]) -> None:
    """Bytes come out as they went in, and count until the share is gone."""
    budget = AnswerBudget()
    share = budget.share()
    for part in parts:
        share.add(part)
    assert budget.held == share.size == sum(map(len, parts))
    assert share.take_counted() == b"".join(parts)
    assert budget.held == share.size, "whoever has the answer now holds it"
    del share
    assert budget.held == 0


def test_one_answer_has_a_bound() -> None:
    """The error names it, and what was held before it is let go at once."""
    budget = AnswerBudget(max_answer=10, max_total=100)
    share = budget.share()
    share.add(b"x" * 10)
    with pytest.raises(
        EngineError, match=r"an answer of more than 10 bytes \(limits.max_answer_bytes\)"
    ):
        share.add(b"x")
    assert (budget.held, share.take_counted()) == (0, b"")


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        (None, AnswerTooLargeError),
        (10, AnswerTooLargeError),
        (9, EngineError),
        (99, AnswerTooLargeError),
    ],
)
def test_who_names_a_smaller_limit_knows_the_answer(
    limit: int | None, kind: type[EngineError]
) -> None:
    """An engine that sends more has failed. Otherwise the request has asked for so much."""
    share = AnswerBudget(max_answer=10, max_total=100).share(limit)
    with pytest.raises(EngineError) as raised:
        share.add(b"x" * 11)
    assert type(raised.value) is kind


@pytest.mark.parametrize(("length", "refused"), [(b"10", False), (b"11", True), (b"", False)])
def test_a_length_is_believed(length: bytes, refused: bool) -> None:
    """An answer that says that it is too large is not waited for."""
    share = AnswerBudget(max_answer=10, max_total=100).share()
    try:
        share.check_length([(b"content-type", b"x"), (b"content-length", length)])
    except EngineError:
        assert refused
    else:
        assert not refused


def test_all_answers_have_a_bound() -> None:
    """What finds no budget is another error; what was there stays."""
    budget = AnswerBudget(max_answer=10, max_total=15)
    first, second = budget.share(), budget.share()
    first.add(b"x" * 10)
    with pytest.raises(AnswerBudgetError, match=r"limits.max_buffered_answer_bytes"):
        second.add(b"x" * 6)
    second.add(b"x" * 5)
    assert budget.held == 15


async def test_a_pending_answer_that_is_closed_or_fails_holds_nothing() -> None:
    """However it ends."""
    budget = AnswerBudget()
    closed, failed = Pending(budget.share()), Pending(budget.share())
    for pending in (closed, failed):
        pending.head(200, [])
        pending.data(b"x" * 100)
    assert budget.held == 200
    failed.failed(EngineError("lost"))
    del closed, pending
    assert budget.held == 0


async def test_a_relay_counts_the_beginning_of_an_event_once() -> None:
    """In reads of any size, and no longer than until the event is whole."""
    budget = AnswerBudget()
    relay = Relay(wants_usage=False, budget=budget)
    relay.head(200, [(b"content-type", b"text/event-stream")])
    event = answers.piece(False, "a" * 5000)
    for at in range(0, len(event) - 1, 100):
        relay.data(event[at : at + 100])
        assert budget.held == min(at + 100, len(event))
        if at + 100 >= len(event):
            break
    assert relay.first.done() or budget.held < len(event)
    relay.failed(EngineError("lost"))
    del relay
    assert budget.held == 0


def test_who_finds_no_budget_holds_nothing() -> None:
    """What it held before is let go at once: its answer will never be whole."""
    budget = AnswerBudget(max_answer=10, max_total=15)
    first, second = budget.share(), budget.share()
    first.add(b"x" * 10)
    second.add(b"x" * 3)
    with pytest.raises(AnswerBudgetError):
        second.add(b"x" * 3)
    assert (budget.held, second.size, second.kept) == (10, 0, 0)
