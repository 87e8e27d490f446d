"""What a rewritten answer may take: an answer as any other one, a stream one event at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.splice_sink import SpliceSink
from pdproxy.upstream.answer_budget import AnswerBudget

LIMIT = 10


def sink(content_type: bytes) -> SpliceSink:
    """A sink behind the head of an answer. Nothing of the answer is shown here."""
    relay: Any = SimpleNamespace(budget=AnswerBudget(max_answer=LIMIT, max_total=1000), head=lambda *_: None)
    made = SpliceSink(relay, cast("Any", SimpleNamespace()))
    made.head(200, [(b"content-type", content_type)])
    return made


def test_an_event_may_be_longer_than_an_answer_may_be() -> None:
    sink(b"text/event-stream; charset=utf-8").data(b"x" * (LIMIT + 1))
    whole = sink(b"application/json")
    whole.data(b"x" * LIMIT)
    with pytest.raises(EngineError, match=r"limits\.max_answer_bytes"):
        whole.data(b"x")
