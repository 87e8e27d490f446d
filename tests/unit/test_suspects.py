"""What counts of the losses of a request, and how long it is remembered."""

from __future__ import annotations

from pdproxy.scheduling.nodes import Node, NodeSpec, Role
from pdproxy.serving.dispatch.abandoned import MOST_OF_ENGINE, AbandonedRequest, AbandonedRequests
from pdproxy.serving.dispatch.loss import Loss, RequestLosses
from pdproxy.serving.dispatch.suspects import FRESH, KEPT, MOST_KEPT, Suspects

NODE = Node(NodeSpec("http://127.0.0.1:1", Role.DECODE))


def lost(*, suspect: bool = True) -> Loss:
    """One that a request was alone at."""
    loss = Loss(NODE, 10.0, 0.0)
    loss.note(1, "one", suspect=suspect)
    return loss


def test_a_loss_counts_for_the_only_suspect() -> None:
    """Others that were there with data are not suspects. A second suspect clears the first one, also if it is noted later."""
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
    assert suspects.add("a", first, None, 0.0, streamed=False) == 1, "the request has lost another engine"
    assert suspects.add("a", first, lambda: False, 0.0, streamed=False) == 1, "which stays so"
    assert suspects.add("a", lost(), None, 0.0, streamed=False) == 2


def test_each_further_loss_doubles_the_refusal() -> None:
    """Behind the refusal, it is served by one engine: the losses may have been chance."""
    suspects: Suspects[str] = Suspects()
    seconds = []
    for at in range(10):
        suspects.add("a", lost(), None, 100.0 * at, streamed=False)
        seconds.append(suspects["a"].refused_for(100.0 * at + 5))
    assert seconds == [0, 0, 10, 25, 55, 115, 235, 475, KEPT - 5, KEPT - 5]
    assert suspects["a"].refused_for(900 + KEPT - 1) == 1
    assert suspects["a"].refused_for(900 + KEPT) == 0


def test_each_is_remembered_for_some_time() -> None:
    """For a minute, it does not get the last engine; data clears it, unless it has lost an engine behind its data."""
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
        abandoned.add(NODE, AbandonedRequest(str(number), "", RequestLosses(number), b"", 0.0, float(number)))
    assert [one.request_id for one in abandoned.at(NODE, MOST_OF_ENGINE)] == [str(MOST_OF_ENGINE + n) for n in (1, 2)]
    assert len(abandoned.at(NODE, 0.0)) == MOST_OF_ENGINE
    abandoned.forget_old(MOST_OF_ENGINE + 3)
    assert not abandoned.at(NODE, 0.0)
