"""The merged answer of a list: what it takes of each prompt's answer, and what it refuses without
making objects of it.
"""

from __future__ import annotations

import json
import sys
import tracemalloc

import pytest

from pdproxy.kit.errors import EngineError
from pdproxy.serving.request.merged_answer import (
    MAX_REENCODED,
    MAX_USAGE,
    MergedAnswer,
    merge_usage_events,
)
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import Answer

USAGE = b'{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}'
DEEP = b'{"a":' * 1000 + b"1" + b"}" * 1000


def completion(text: str = "a", *, usage: bytes = USAGE, more: bytes = b"") -> bytes:
    """A whole answer as vLLM writes it."""
    choice = b'{"index":0,"text":%b,"logprobs":null}' % json.dumps(text).encode()
    return b'{"id":"cmpl-1","model":"m","choices":[%b],"usage":%b,"new":[1, 2]%b}' % (
        choice,
        usage,
        more,
    )


def merged(*bodies: bytes) -> bytes:
    answer = MergedAnswer(AnswerBudget().share())
    for index, body in reversed(list(enumerate(bodies))):
        answer.add(index, Answer(200, [], body))
    return answer.whole().body


def test_all_that_the_first_answer_has_is_kept_in_its_place() -> None:
    """Unknown fields, and the order: only the choices and the usage are others."""
    texts = ["a", 'so "index":0, "usage":{} and "choices":[] it is', "c"]
    choices = ",".join(
        f'{{"index":{n},"text":{json.dumps(text)},"logprobs":null}}' for n, text in enumerate(texts)
    )
    usage = '{"prompt_tokens":9,"total_tokens":15,"completion_tokens":6}'
    expected = f'{{"id":"cmpl-1","model":"m","choices":[{choices}],"usage":{usage},"new":[1, 2]}}'
    assert merged(*map(completion, texts)) == expected.encode()


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(json.loads(completion()), indent=1).encode(),
        b'{"usage":%b,"choices":[{"text":"a"}],"inner":{"choices":[{"text":"a"}]}}' % USAGE,
        b'{"inner":{"usage":%b,"choices":[]},"choices":[{"text":"a","index":7}],"usage":%b}'
        % (USAGE, USAGE),
    ],
    ids=["spaces", "no index", "the same fields further down"],
)
def test_an_answer_that_is_written_otherwise_is_merged_all_the_same(body: bytes) -> None:
    """Other servers put spaces and fields elsewhere."""
    found = json.loads(merged(body, body))
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        (0, "a"),
        (1, "a"),
    ]
    assert found["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (completion(usage=b'{"a":"%b"}' % (b"x" * MAX_USAGE)), "a usage of more than"),
        pytest.param(
            completion(usage=DEEP[: MAX_USAGE // 8 * 5] + b"1" + b"}" * (MAX_USAGE // 8)),
            "not a completion",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 12), reason="since 3.12 Python reads that deep"
            ),
        ),
        (b'{"choices":[{"index":0},{"index":1}],"usage":{}}', "not a completion"),
        (b'{"choices":[],"usage":{}}', "not a completion"),
        (completion().replace(b"cmpl", b"\0"), "not a completion"),
        (b'{"choices":[{"index":0}]}', "not a completion"),
        (
            b'{"choices": [{"index":0}],"usage":{},"x":"%b"}' % (b"x" * MAX_REENCODED),
            "its form is not vLLM's",
        ),
    ],
    ids=[
        "a long usage",
        "a deep usage",
        "two choices",
        "no choice",
        "control characters",
        "no usage",
        "a long answer with spaces",
    ],
)
def test_what_is_no_answer_to_one_prompt_is_refused(body: bytes, said: str) -> None:
    """With a message that gives the reason, never with an internal error."""
    with pytest.raises(EngineError, match=said):
        merged(body, body)


def test_an_answer_costs_no_more_memory_for_its_fields() -> None:
    """A megabyte of fields that nobody knows is copied, and not made objects."""
    body = completion(more=b"," + b",".join([b'"k%d":0' % number for number in range(100_000)]))
    tracemalloc.start()
    try:
        merged(body, body)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
    finally:
        tracemalloc.stop()


def test_a_deep_usage_in_a_stream_is_refused() -> None:
    """As in a whole answer."""
    event = b'data: {"id":"c","choices":[],"usage":%b}\n\n'
    with pytest.raises(EngineError):
        merge_usage_events([event % DEEP] * 2)
