"""Keys and deadlines: what clients send, and each rule about it, broken by hand."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from pdproxy.observe.events import Gaps, RequestEnded
from pdproxy.settings.keys import read_key_lines
from tests.chaos.access import KEYS, LINES, NOBODY, STRANGER, UNREADABLE, Credentials, drawn
from tests.chaos.access_rules import admitted, within_limits
from tests.chaos.clients import Outcome


def outcome(
    sender: Credentials,
    how: str = "right",
    detail: str = "",
    took: float = 1.0,
    *,
    slow: bool = False,
) -> Outcome:
    return Outcome("a", 1, how, detail, 0.0, took, slow=slow, sender=sender, ready=0.0)


def rules(*outcomes: Outcome) -> set[str]:
    return {one.rule for one in admitted(outcomes)}


def test_the_file_of_keys_says_what_the_rules_assume(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(LINES)
    assert {one.name: one.limits for one in read_key_lines("keys", str(file))} == KEYS


def test_clients_differ_and_their_headers_name_it() -> None:
    chance = random.Random(1)
    made = [drawn(chance) for _ in range(1000)]
    assert {one.key for one in made} == {*KEYS, STRANGER, NOBODY}
    assert {one.timeout for one in made} >= {"", "0.05", "6", UNREADABLE}
    assert all(bool(one.words()) == (one != Credentials()) for one in made)
    one = Credentials("few", "6", 3, "people")
    assert one.headers == [
        b"authorization: Bearer chaos-few",
        b"x-request-timeout: 6",
        b"x-vllm-priority: 3",
        b"x-chaos-tenant: people",
    ]
    assert Credentials(NOBODY).headers == []


def test_refusals_that_a_client_may_get() -> None:
    assert Credentials().refusals == {(429, "share")}
    assert Credentials("few").refusals == {(429, "share"), (429, "key_inflight")}
    assert Credentials(timeout="6").refusals == {(429, "share"), (503, "deadline")}
    assert Credentials(STRANGER).refusals == {(429, "share"), (401, "")}
    assert Credentials(timeout=UNREADABLE).refusals == {(429, "share")}


def test_what_must_be_refused() -> None:
    refused = "what must be refused is refused"
    for sender, detail in (
        (Credentials(STRANGER), "401"),
        (Credentials(NOBODY), "401"),
        (Credentials(timeout="0.05"), "503 deadline"),
    ):
        assert rules(outcome(sender, "error", detail, 0.01)) == set()
        assert rules(outcome(sender, "right", took=0.01)) == {refused}
    assert rules(outcome(Credentials(STRANGER), "error", "502")) == {refused}
    assert rules(outcome(Credentials(STRANGER), "error", "503 bodies")) == set()
    assert rules(outcome(Credentials(STRANGER), "left")) == set()


@pytest.mark.parametrize("how", ["right", "error", "cut", "silent"])
def test_nobody_waits_past_its_deadline(how: str) -> None:
    sender = Credentials(timeout="6")
    assert rules(outcome(sender, how, took=6.4)) == set()
    assert rules(outcome(sender, how, took=6.6)) == {"nobody waits past its deadline"}
    assert rules(outcome(sender, how, took=60.0, slow=True)) == set()
    assert rules(msgspec.structs.replace(outcome(sender, how, took=60.0), ready=None)) == set()
    assert rules(outcome(Credentials(), how, took=60.0)) == set()


def report(
    key: str, begun: float, over: float, reason: str | None = None
) -> tuple[float, RequestEnded]:
    ended = RequestEnded(
        *("a", "/v1/completions", None, "ok", 200, (), 0.0, None, over - begun, None, None, Gaps()),
        key=key,
        reason=reason,
    )
    return over, ended


def limits(*reports: tuple[float, RequestEnded]) -> set[str]:
    return {one.rule for one in within_limits(reports)}


def test_requests_at_once_of_a_key() -> None:
    two = [report("few", 1.0, 5.0), report("few", 2.0, 4.0)]
    assert limits(*two, report("few", 4.0, 6.0), report("few", 5.0, 7.0)) == set()
    assert limits(*two, report("few", 3.0, 3.0, "key_inflight")) == set()
    assert limits(*two, report("few", 3.0, 6.0)) == {"limits of keys hold"}
    assert limits(*two, report("open", 3.0, 6.0)) == set()
    assert limits(*two, report("few", 4.5, 4.5, "key_inflight")) == {
        "limits of keys refuse nothing else"
    }


def test_requests_per_minute_of_a_key() -> None:
    many = [report("seldom", at / 10, at / 10 + 1) for at in range(12)]
    late = 1.0 + 60.0 / 12
    assert limits(*many) == set()
    assert limits(*many, report("seldom", 2.0, 2.0, "key_requests")) == set()
    assert limits(*many, report("seldom", 2.0, 3.0)) == {"limits of keys hold"}
    assert limits(*many, report("seldom", late, late + 1)) == set()
    assert limits(*many, report("seldom", late, late, "key_requests")) == {
        "limits of keys refuse nothing else"
    }


def test_a_request_that_is_left_before_the_scheduler_process_has_answered() -> None:
    """With several workers nobody knows at its end whether it is served."""
    limit = KEYS["seldom"].rpm
    assert limit is not None
    every = [report("seldom", at / 1000, 1.0) for at in range(limit)]
    over, last = report("seldom", 0.5, 0.5)
    left = over, msgspec.structs.replace(last, outcome="client_left", status=0)
    refused = report("seldom", 0.6, 0.6, "key_requests")
    assert {one.rule for one in within_limits([*every, left])} == {"limits of keys hold"}
    assert within_limits([*every, left, refused], 0.008) == []
    assert within_limits([*every[1:], left, refused], 0.008) == []
    served = report("seldom", 0.7, 0.9)
    assert {one.rule for one in within_limits([*every, served], 0.008)} == {"limits of keys hold"}
