"""What a rewritten answer may take: an answer as any other one, a stream one event at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream import whole_events
from pdproxy.serving.stream.splice_sink import SpliceSink
from pdproxy.upstream.answer_budget import AnswerBudget

LIMIT = 10


def sink(content_type: bytes) -> SpliceSink:
    """A sink behind the head of an answer. Nothing of the answer is shown here."""
    relay: Any = SimpleNamespace(
        budget=AnswerBudget(max_answer=LIMIT, max_total=1000), head=lambda *_: None
    )
    made = SpliceSink(relay, cast("Any", SimpleNamespace()))
    made.head(200, [(b"content-type", content_type)])
    return made


def test_the_limit_of_events_is_that_of_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_events, "MAX_EVENT", LIMIT // 2)
    stream, whole = sink(b"text/event-stream; charset=utf-8"), sink(b"application/json")
    with pytest.raises(EngineError, match="an event of more than 5 bytes"):
        stream.data(b"x" * LIMIT)
    whole.data(b"x" * LIMIT)
    with pytest.raises(EngineError, match="an answer of more than 10 bytes"):
        whole.data(b"x")
