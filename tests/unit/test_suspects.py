"""What counts of the losses of a request, and how long it is remembered."""

from __future__ import annotations

from pdproxy.deciding.abandoned import MOST_OF_ENGINE, AbandonedRequest, AbandonedRequests
from pdproxy.deciding.few_first import FewFirst
from pdproxy.deciding.loss import Loss, RequestLosses
from pdproxy.deciding.suspects import (
    FIRST_REFUSAL,
    FRESH,
    KEPT,
    LAST_REFUSAL,
    MOST_KEPT,
    MOST_LOSSES,
    Suspects,
)
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine, Role
from tests.fakes.clock import ManualClock

NODE = LedgerEngine(EngineSpec("http://127.0.0.1:1", Role.DECODE))


def lost(*, suspect: bool = True) -> Loss:
    """One that a request was alone at."""
    loss = Loss(NODE, 10.0, 0.0)
    loss.note(1, "one", suspect=suspect)
    return loss


def test_a_loss_counts_for_the_only_suspect() -> None:
    """Others that were there with data are not suspects. A second suspect clears the first one,
    also if it is noted later.
    """
    loss = lost(suspect=False)
    assert loss.is_of_request(1), "it was alone"
    loss.note(2, "two", suspect=True)
    assert (loss.is_of_request(1), loss.is_of_request(2)) == (False, True)
    assert (loss.is_of_client("one"), loss.is_of_client("two")) == (False, True)
    loss.note(3, "two", suspect=True)
    assert (loss.is_of_request(2), loss.is_of_client("two")) == (False, True)
    loss.note(4, "three", suspect=True)
    assert not loss.is_of_client("two")


def test_what_counts_is_asked_when_it_matters() -> None:
    suspects: Suspects[str] = Suspects()
    first, counts = lost(), [True]
    assert suspects.add("a", first, lambda: counts[0], 0.0, streamed=False) == 1
    counts[0] = False
    assert suspects.losses("a") == 0, "others turned out to have been there"
    assert suspects.fresh_roles("a", 0.0) == frozenset()
    assert suspects.add("a", first, None, 0.0, streamed=False) == 1, (
        "the request has lost another engine"
    )
    assert suspects.add("a", first, lambda: False, 0.0, streamed=False) == 1, "which stays so"
    assert suspects.add("a", lost(), None, 0.0, streamed=False) == 2


def test_each_further_loss_doubles_the_refusal() -> None:
    """Behind the refusal, it is served by one engine: the losses may have been chance."""
    suspects: Suspects[str] = Suspects()
    seconds = []
    for at in range(10):
        suspects.add("a", lost(), None, 100.0 * at, streamed=False)
        seconds.append(suspects["a"].refused_for(100.0 * at + 5))
    assert seconds == [0, 0, 10, 25, 55, 115, 235, 475, 955, 1915]
    assert suspects["a"].refused_for(900 + 1920 - 1) == 1
    assert suspects["a"].refused_for(900 + 1920) == 0
    for at in range(100):
        suspects.add("a", lost(), None, 1000.0 + at, streamed=False)
    assert suspects["a"].refused_for(1099.0) == LAST_REFUSAL, "the longest"
    assert suspects.losses("a") == MOST_LOSSES


def test_who_was_refused_is_remembered_behind_that() -> None:
    """Forgotten with the end of a refusal, it would take as many engines again. One that is kept
    longer holds up no other.
    """
    suspects: Suspects[str] = Suspects()
    for _ in range(9):
        suspects.add("a", lost(), None, 0.0, streamed=False)
    suspects.add("b", lost(), None, 1.0, streamed=False)
    refused = FIRST_REFUSAL * 2**6
    assert suspects["a"].refused_for(0.0) == refused > KEPT
    suspects.forget_old(KEPT + 1)
    assert [*suspects] == ["a"]
    suspects.forget_old(refused + KEPT - 1)
    assert suspects.losses("a") == 9
    suspects.forget_old(refused + KEPT)
    assert not suspects


def test_a_further_loss_lets_fewer_begin() -> None:
    """Those that wait for their turn are one after the other again."""
    suspects: Suspects[str] = Suspects()
    suspects.add("a", lost(), None, 0.0, streamed=False)
    turns = suspects["a"].turns = FewFirst(ManualClock())
    turns.open()
    suspects.add("a", lost(), None, 0.0, streamed=False)
    assert turns.limit == 1


def test_each_is_remembered_for_some_time() -> None:
    """For a minute, it does not get the last engine; data clears it, unless it has lost an engine
    behind its data.
    """
    suspects: Suspects[str] = Suspects()
    suspects.add("a", lost(), None, 0.0, streamed=False)
    assert suspects.fresh_roles("a", FRESH - 1) == {Role.DECODE}
    assert suspects.fresh_roles("a", FRESH) == frozenset()
    suspects.add("b", lost(suspect=False), None, 1.0, streamed=True)
    assert suspects.fresh_roles("b", FRESH) == frozenset()
    for key in ("a", "b", None):
        suspects.answered(key, whole=False)
    assert [*suspects] == ["b"]
    suspects.forget_old(KEPT)
    assert suspects.losses("b") == 1
    suspects.forget_old(KEPT + 1)
    assert not suspects
    for number in range(MOST_KEPT + 2):
        suspects.add(str(number), lost(), None, 0.0, streamed=False)
    assert len(suspects) == MOST_KEPT


def test_abandoned_requests_are_bounded() -> None:
    """Those of one engine, and their time."""
    abandoned = AbandonedRequests()
    for number in range(MOST_OF_ENGINE + 3):
        abandoned.add(
            NODE, AbandonedRequest(str(number), "", RequestLosses(number), b"", 0.0, float(number))
        )
    assert [one.request_id for one in abandoned.at(NODE, MOST_OF_ENGINE)] == [
        str(MOST_OF_ENGINE + n) for n in (1, 2)
    ]
    assert len(abandoned.at(NODE, 0.0)) == MOST_OF_ENGINE
    abandoned.forget_old(MOST_OF_ENGINE + 3)
    assert not abandoned.at(NODE, 0.0)
