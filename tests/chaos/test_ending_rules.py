"""Rules about the end of a run, about streams that go on and about KV handles, each broken by
hand.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.observe.events import StreamContinued
from tests.chaos.answers import Told
from tests.chaos.clients import Outcome
from tests.chaos.continued_rules import explained, unbroken
from tests.chaos.ending import series_left, stopped
from tests.chaos.finding import Finding
from tests.chaos.kv_books import KvBooks
from tests.chaos.oracle import CHAT, COMPLETIONS, Body
from tests.chaos.soundness import AFTER, Soundness

ASKED = 100.0


def outcome(how: str, detail: str = "", began: float = ASKED, ended: float = ASKED + 1) -> Outcome:
    return Outcome("a", 1, how, detail, began, ended, ready=began)


def rules(found: list[Finding]) -> set[str]:
    return {one.rule for one in found}


def test_a_proxy_that_stops() -> None:
    wrong = {"a proxy that stops ends what it has begun"}
    good = [
        outcome("right", began=99.0),
        outcome("left"),
        outcome("error", "503 draining"),
        outcome("refused", began=101.0),
    ]
    assert stopped(good, ASKED, 3.0, alone=True) == []
    assert rules(stopped(good, ASKED, 300.0, alone=True)) == {"a proxy ends in time"}
    begun = outcome("error", "503 draining", began=99.0)
    assert rules(stopped([begun], ASKED, 3.0, alone=True)) == wrong, "it was in flight"
    assert stopped([begun], ASKED, 3.0, alone=False) == []
    for one in (
        outcome("error", "502"),
        outcome("cut", began=99.0),
        outcome("wrong"),
        outcome("silent"),
    ):
        assert rules(stopped([one], ASKED, 3.0, alone=True)) == wrong
    early = outcome("error", "503 draining", began=98.0, ended=99.0)
    assert rules(stopped([early], ASKED, 3.0, alone=False)) == wrong


def test_series_of_a_removed_engine() -> None:
    page = '# TYPE pdproxy_node_up gauge\npdproxy_node_up{node="http://p:1",role="prefill"} 1\n'
    assert series_left(page, "http://d:1") == []
    assert rules(series_left(page, "http://p:1")) == {"a removed engine leaves no series"}


def test_engines_are_sound_some_time_behind_a_fault() -> None:
    soundness = Soundness(["D0", "D1"])
    soundness.disturbed("D0", 10.0, 12.0)
    assert soundness.sound(9.0, 9.0) == ["D0", "D1"]
    assert soundness.sound(9.0, 11.0) == ["D1"]
    assert soundness.sound(12.0 + AFTER, 50.0) == ["D1"]
    assert soundness.sound(12.1 + AFTER, 50.0) == ["D0", "D1"]


@pytest.mark.parametrize(
    ("fields", "reason", "rule"),
    [
        ({}, "none_left", None),
        ({}, "half_letter", None),
        ({}, "stop_pending", "a stream goes on if its request allows it"),
        ({}, "unknown_field", "a stream goes on if its request allows it"),
        ({"stop": ["a"]}, "stop_pending", None),
        ({"n": 2}, "n", None),
        ({"n": 2}, "memory", "a stream goes on if its request allows it"),
        ({}, "no_engine", "a stream goes on while an engine is sound"),
    ],
)
def test_why_a_stream_ended(fields: dict[str, Any], reason: str, rule: str | None) -> None:
    decided = [
        (50.0, StreamContinued("refused", reason, None, "a")),
        (50.0, StreamContinued("continued", "eof", 0.1, "a")),
    ]
    asked = {"a": Body("/v1/completions", fields)}
    found = explained(decided, asked, Soundness(["P0", "D0"]), ["D0"])
    assert rules(found) == ({rule} if rule else set())
    assert explained(decided, {}, Soundness(["D0"]), ["D0"]) == [], "of another phase"


@pytest.mark.parametrize(
    ("path", "text", "end", "allowed"),
    [
        (CHAT, "a \u00e9", "stop", True),
        (CHAT, "a e", "stop", False),
        (CHAT, "a e", "length", False),
        (CHAT, "", "length", True),
        (CHAT, "a", "length", True),
        (COMPLETIONS, "a \u00e9", "stop", False),
        (COMPLETIONS, "", "length", False),
    ],
)
def test_a_chat_may_end_at_half_a_letter(path: str, text: str, end: str, allowed: bool) -> None:
    """The engine's parser withholds it, and nobody knows whether it is content."""
    decided = [(50.0, StreamContinued("refused", "reasoning_seen", None, "a"))]
    body = Body(path, {"max_tokens": 2}, Told({0: text}, {0: end}))
    found = explained(decided, {"a": body}, Soundness(["D0"]), ["D0"])
    assert rules(found) == (set() if allowed else {"a stream goes on if its request allows it"})


def test_no_engine_is_a_reason_while_all_are_disturbed() -> None:
    soundness = Soundness(["P0", "D0"])
    soundness.disturbed("D0", 49.0, 51.0)
    decided = [(50.0, StreamContinued("refused", "no_engine", None, "a"))]
    assert explained(decided, {"a": Body("/v1/completions", {})}, soundness, ["D0"]) == []


def test_one_engine_fails() -> None:
    assert unbroken([outcome("right")], {"a": "kill of D0"}) == []
    (found,) = unbroken([outcome("error", "event 502")], {"a": "kill of D0"})
    assert found.rule == "a stream survives one engine"
    assert "kill of D0" in found.text


class _Custodian:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def take(self, handle: str, state: object) -> Any:
        return SimpleNamespace(handle=SimpleNamespace(remote_request_id=handle), state=state)

    promise = take

    def ended(self, custody: Any, how: Any) -> None:
        self.said.append(custody)


def test_handles_are_booked_one_by_one() -> None:
    custodian: Any = _Custodian()
    books = KvBooks(custodian)
    how = SimpleNamespace(label="loaded")
    one, other = custodian.take("one", "held"), custodian.promise("other", "promised")
    assert {finding.text for finding in books.findings()} == {
        "one has not ended",
        "other has not ended",
    }
    custodian.ended(one, how)
    custodian.ended(other, how)
    assert books.findings() == []
    assert (books.made, books.ended, custodian.said) == (2, 2, [one, other])
    custodian.ended(one, how)
    assert [finding.text for finding in books.findings()] == [
        "one ended (loaded), and was not held"
    ]
    carried = custodian.take("nothing is held", None)
    assert carried.state is None
    assert books.made == 2
