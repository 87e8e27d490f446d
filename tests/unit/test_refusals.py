"""Requests that are refused now and may be served later: each has a reason, and the time after
which to ask again.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import pdproxy
from pdproxy.kit.errors import (
    AnswerBudgetError,
    BodyTooLargeError,
    EngineError,
    LimitError,
    OverloadedError,
    PdproxyError,
    RefusalReason,
    TooLateError,
    TooManyConnectionsError,
)
from pdproxy.kit.process_pool import ProcessLostError
from pdproxy.observe.events import Refused
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.requests import STATUS_OF
from pdproxy.wire.api_errors import Dialect, failure_body
from pdproxy.wire.errors import error_body, retry_headers

PACKAGE = Path(pdproxy.__file__).parent
WITH_REASON = ("OverloadedError", "LimitError")


def made(path: Path) -> list[ast.Call]:
    """Where a file makes one of these errors."""
    calls = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
    return [one for one in calls if isinstance(one.func, ast.Name) and one.func.id in WITH_REASON]


def test_each_overload_error_names_its_reason() -> None:
    """Where it is made, a member of `RefusalReason` stands behind the message; and each reason is
    used somewhere.
    """
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        used |= {
            word.attr
            for word in ast.walk(ast.parse(path.read_text()))
            if isinstance(word, ast.Attribute)
        }
        for call in made(path):
            _, reason, *_ = call.args
            assert isinstance(reason, ast.Attribute), f"{path}:{call.lineno}"
            assert RefusalReason[reason.attr]
    assert {reason.name for reason in RefusalReason} <= used


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (OverloadedError("x", RefusalReason.NO_ENGINE), 503, "no_engine"),
        (LimitError("x", RefusalReason.SHARE), 429, "share"),
        (TooLateError("x"), 503, "objective"),
        (TooManyConnectionsError("x"), 503, "connections"),
        (ProcessLostError("x"), 503, "readers"),
        (AnswerBudgetError("x"), 503, "answers"),
    ],
)
def test_the_reason_is_in_the_body(error: PdproxyError, status: int, reason: str) -> None:
    """Clients can tell their own limit from a lack of engines, and the metric has the same
    words.
    """
    assert (error.status, STATUS_OF[reason]) == (status, str(status))
    found = json.loads(error_body(error))["error"]
    assert (found["reason"], found["code"], found["message"]) == (reason, status, "x")
    anthropic = json.loads(failure_body(Dialect.MESSAGES, error))
    assert set(anthropic["error"]) == {"type", "message"}, "that API has no such field"


@pytest.mark.parametrize("error", [EngineError("x"), BodyTooLargeError("x"), PdproxyError("x")])
def test_other_failures_have_neither_a_reason_nor_a_time(error: PdproxyError) -> None:
    assert list(json.loads(error_body(error))["error"]) == ["message", "type", "param", "code"]
    assert retry_headers(error) == []


@pytest.mark.parametrize(
    ("seconds", "header"),
    [(None, b"1"), (0.0, b"1"), (-3.0, b"1"), (1.01, b"2"), (59.2, b"60"), (1e9, b"60")],
)
def test_the_time_is_whole_seconds_from_1_to_60(seconds: float | None, header: bytes) -> None:
    error = OverloadedError("x", RefusalReason.QUEUE_FULL, retry_after=seconds)
    assert retry_headers(error) == [(b"retry-after", header)]


def test_refusals_before_a_body_is_complete_count_as_well() -> None:
    """Those for want of space or connections; not those that are wrong at any time."""
    metrics = Metrics()
    metrics.notify(Refused("no_space", "192.0.2.1", "bodies"))
    metrics.notify(Refused("bad_http", "192.0.2.1"))
    page = metrics.page().decode()
    assert 'pdproxy_refusals_total{reason="bodies",status="503"} 1.0' in page
    assert (
        sum(
            line.endswith(" 1.0")
            for line in page.splitlines()
            if line.startswith("pdproxy_refusals_total")
        )
        == 1
    )
