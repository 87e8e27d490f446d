"""When an engine is sent ids, and what an answer of its own proves."""

from typing import Any

import msgspec
import pytest

from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.serving.dispatch.tokenizer_check import EVERY, TokenizerCheck
from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route
from tests.fakes.registry import registry, unused_client

P, OTHER = "http://p:1", "http://p:2"
IDS = TokenIds(b"[1,2]", 2)


def request(route: Route = Route.CHAT, **fields: Any) -> Parsed:
    """A request."""
    body = (
        {"prompt": "x"}
        if route is Route.COMPLETIONS
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    return parse(route, msgspec.json.encode({"model": "m", **body, **fields}))


class Stage:
    """Proofs, and what they refuted."""

    def __init__(self) -> None:
        self.engines, self.ledger = registry(*(EngineSpec(url, Role.PREFILL) for url in (P, OTHER)))
        self.refutations: list[tuple[str, Route]] = []
        self.check = TokenizerCheck(self.engines, self)

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """Hear of it."""
        self.refutations.append((url, route))


@pytest.fixture
def stage() -> Stage:
    """One."""
    return Stage()


def test_none_before_the_first_proof(stage: Stage) -> None:
    """However many requests are under way; then all but one in so many."""
    chat = request()
    assert [stage.check.sent(P, chat, IDS) for _ in range(3)] == [None] * 3
    stage.check.served(P, chat, IDS, None, b"[1, 2]")
    sent = [stage.check.sent(P, chat, IDS) for _ in range(2 * EVERY)]
    assert (sent.count(IDS), sent.count(None)) == (2 * EVERY - 2, 2)
    stage.check.served(P, chat, IDS, None, b"[1,2]")
    assert stage.check.sent(P, chat, IDS) == IDS
    assert stage.refutations == []


@pytest.mark.parametrize(
    "other",
    [request(Route.COMPLETIONS), request(tools=[]), request(model="n")],
    ids=["route", "tools", "model"],
)
def test_each_kind_is_proven_by_itself(stage: Stage, other: Parsed) -> None:
    """By route, model, and with tools or without: they may be tokenized in other ways. Also each
    engine, and each of its runs.
    """
    stage.check.served(P, request(), IDS, None, b"[1,2]")
    assert stage.check.sent(P, request(), IDS) == IDS
    assert stage.check.sent(P, other, IDS) is None
    assert stage.check.sent(OTHER, request(), IDS) is None
    stage.ledger.mark_up(P, Evidence(frozenset("m"), "1", 16, (), 0, 2.0))
    assert stage.check.sent(P, request(), IDS) is None


def test_what_an_answer_proves_nothing_by(stage: Stage) -> None:
    """It was sent ours, says none, or there were none to compare."""
    for given in ((IDS, IDS, b"[9]"), (IDS, None, None), (None, None, b"[9]")):
        stage.check.served(P, request(), *given)
    assert (stage.check.sent(P, request(), IDS), stage.refutations) == (None, [])
    assert stage.check.sent(P, request(), None) is None


@pytest.mark.parametrize("served", [b"[1,2,3]", b"[2,1]", b"[]", b"{", b'["1"]'])
def test_other_ids_refute(stage: Stage, served: bytes) -> None:
    """Also after many that were the same: from then on it is as if nothing had been proven."""
    stage.check.served(P, request(), IDS, None, b"[1,2]")
    stage.check.served(P, request(), IDS, None, served)
    assert stage.refutations == [(P, Route.CHAT)]
    assert stage.check.sent(P, request(), IDS) is None


def test_an_engine_that_was_removed(stage: Stage) -> None:
    """A leg that was under way proves nothing, and what was proven before does not count when it is
    added again.
    """
    stage.check.served(P, request(), IDS, None, b"[1,2]")
    stage.engines.remove(P)
    stage.check.served(P, request(), IDS, None, b"[9]")
    assert (stage.check.sent(P, request(), IDS), stage.refutations) == (None, [])
    stage.engines.add(EngineSpec(P, Role.PREFILL), unused_client(P))
    assert stage.check.sent(P, request(), IDS) is None
