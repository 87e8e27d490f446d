"""A stream cut anywhere and gone on with as a completion: the client has the events of the uncut
one.
"""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.continuation import continued
from pdproxy.transfer.continued_events import ContinuedEvents, LastEvent
from pdproxy.wire import sse
from pdproxy.wire.chunks import chunk
from pdproxy.wire.continuable import Continuable, shows_ids
from pdproxy.wire.route import Route

PROMPT = 9
DETAILS = {"cached_tokens": 8}


def encoded(event: dict[str, Any]) -> bytes:
    """An event in vLLM's form."""
    return sse.data(json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode())


def head(*, chat: bool, first: bool) -> dict[str, Any]:
    """What an engine's events all show: the first engine's, or that of the one that goes on with a
    completion.
    """
    kind = "chat.completion.chunk" if chat else "text_completion"
    name = ("chatcmpl-" if chat else "cmpl-") + "r"
    return {"id": name, "object": kind, "created": 100 if first else 222, "model": "tiny"}


def events(
    parts: list[str], *, chat: bool, first: bool, prompt: int, running: bool, finish: bool = True
) -> list[bytes]:
    """An engine's stream of these texts, without its ids: what a relay writes."""
    shown, found = head(chat=chat, first=first), []
    if chat:
        delta = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        found.append(
            encoded(shown | {"choices": [delta], "prompt_token_ids": None, "prompt_text": None})
        )
    for number, text in enumerate(parts, 1):
        ended = "length" if finish and number == len(parts) else None
        choice: dict[str, Any] = {"index": 0}
        if chat:
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": ended}
            choice |= {"stop_reason": None} if ended else {}
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": ended, "stop_reason": None}
            choice |= {"prompt_token_ids": None}
        event = shown | {"choices": [choice | {"token_ids": None}]}
        if running:
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + number,
                "completion_tokens": number,
            }
            event["usage"] = usage | ({"completion_tokens_details": None} if chat else {})
        found.append(encoded(event))
    if finish:
        count = len(parts)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + count,
            "completion_tokens": count,
        }
        usage = counts | {
            "prompt_tokens_details": DETAILS if prompt == PROMPT else {"cached_tokens": prompt}
        }
        found += [
            encoded(shown | {"choices": [], "usage": usage, "system_fingerprint": "f"}),
            sse.DONE + sse.END,
        ]
    return found


TEXTS = st.lists(st.text(max_size=5), min_size=2, max_size=12)


@given(TEXTS, st.data(), st.booleans(), st.booleans())
def test_any_cut_gives_the_uncut_stream(
    texts: list[str], data: st.DataObject, chat: bool, running: bool
) -> None:
    """Whatever the texts are, wherever it is cut and however the reads are joined, byte for
    byte.
    """
    at = data.draw(st.integers(0 if chat else 1, len(texts) - 1))
    uncut = events(texts, chat=chat, first=True, prompt=PROMPT, running=running)
    before = events(texts[:at], chat=chat, first=True, prompt=PROMPT, running=running, finish=False)
    behind = events(texts[at:], chat=False, first=False, prompt=PROMPT + at, running=running)
    last = LastEvent(before[-1])
    writer = ContinuedEvents(last.shown, is_chat=last.is_chat, done=at, cached=8)
    reads = data.draw(st.lists(st.integers(0, len(behind)), max_size=3).map(sorted))
    places = [0, *reads, len(behind)]
    got = [writer.batch(b"".join(behind[a:b])) for a, b in pairwise(places)]
    assert b"".join(before) + b"".join(got) == b"".join(uncut)


@pytest.mark.parametrize("chat", [False, True])
def test_cached_tokens_of_the_longer_prompt(chat: bool) -> None:
    """Where nobody knows the first engine's, at most all of the client's own prompt was cached."""
    *_, usage, _ = events(["a", "b"], chat=False, first=False, prompt=PROMPT + 3, running=False)
    shown = LastEvent(
        events(["x"], chat=chat, first=True, prompt=PROMPT, running=False, finish=False)[-1]
    ).shown
    found = json.loads(sse.payload(ContinuedEvents(shown, is_chat=chat, done=3).event(usage)))
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": PROMPT}
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (PROMPT, 5)
    assert found["created"] == 100


def test_comments_and_the_end_mark_stay() -> None:
    """They show nothing of an engine."""
    writer = ContinuedEvents({}, is_chat=False, done=3)
    assert writer.batch(b": ping\n\n" + sse.DONE + sse.END) == b": ping\n\n" + sse.DONE + sse.END


@pytest.mark.parametrize(
    "event",
    [
        b"data: {}\n\n",
        b"data: nothing\n\n",
        b'data: {"choices":{}}\n\n',
        b'data: {"choices":[1]}\n\n',
        b'data: {"choices":[],"usage":3}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":"x"}}\n\n',
        (
            b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,'
            b'"prompt_tokens_details":3}}\n\n'
        ),
    ],
)
def test_what_is_no_completion_is_an_error(event: bytes) -> None:
    """An engine can send anything."""
    with pytest.raises(NotACompletionError):
        ContinuedEvents({}, is_chat=False, done=1).batch(event)


@pytest.mark.parametrize("chat", [False, True])
def test_the_last_event(chat: bool) -> None:
    """Its text, its ids, and events like it; the ids that it came with are in none of them."""
    sent = events(
        ["a", "b\u00e9"], chat=chat, first=True, prompt=PROMPT, running=False, finish=False
    )[-1]
    sent = sent.replace(b'"token_ids":null', b'"token_ids":[5,6]')
    for form in (sent, chunk(sent), sent.replace(b'":', b'": ')):
        last = LastEvent(form)
        assert (last.text, last.ids, last.is_chat) == ("b\u00e9", 2, chat)
        assert last.kind == ("content" if chat else "text")
        assert (
            sse.data(last.with_text("held"))
            == events(["held"], chat=chat, first=True, prompt=PROMPT, running=False, finish=False)[
                -1
            ]
        )
        usage = json.loads(last.usage_event(4, 2))
        assert usage == head(chat=chat, first=True) | {
            "choices": [],
            "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
        }


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b": ping\n\n",
        b"data: [DONE]\n\n",
        b"data: {}\n\n",
        b'data: {"id":"a","object":"b","created":1,"model":"c","choices":[]}\n\n',
        b'data: {"id":"a","object":"b","created":1,"model":"c","choices":[{},{}]}\n\n',
        b'data: {"id":"a","object":"b","created":1,"model":"c","choices":[{"text":5}]}\n\n',
        (
            b'data: {"id":"a","object":"b","created":1,"model":"c","choices":[{"text":"x",'
            b'"token_ids":["a"]}]}\n\n'
        ),
        b'data: {"id":"a","object":"b","created":1,"model":"c","choices":[{"delta":[]}]}\n\n',
    ],
)
def test_no_last_event(sent: bytes) -> None:
    """Then nobody goes on with the stream."""
    with pytest.raises(NotACompletionError):
        LastEvent(sent)


def kept(**changes: Any) -> Continuable:
    """What is kept of a request."""
    found: dict[str, Any] = {
        "route": Route.CHAT,
        "model": "tiny",
        "sampling": b'{"temperature":0,"stop":["x"]}',
    }
    found |= {
        "limit": 10,
        "min_tokens": 0,
        "stops": ("x",),
        "shows_stop": False,
        "wants_usage": False,
    }
    return Continuable(**(found | changes))


@pytest.mark.parametrize(
    ("ids", "minimum", "left"), [([], 4, 4), ([7], 4, 3), ([7, 8, 9], 3, None), ([7, 8], 0, None)]
)
def test_the_request_behind_some_ids(ids: list[int], minimum: int, left: int | None) -> None:
    """The ids so far belong to the prompt, and count for the limit and the minimum."""
    parsed, prompt = continued(kept(min_tokens=minimum), b"[1, 2,3]", array("I", ids), limit=10)
    fields = {name: json.loads(bytes(value)) for name, value in parsed.fields.items()}
    expected = {
        "temperature": 0,
        "stop": ["x"],
        "model": "tiny",
        "prompt": [1, 2, 3, *ids],
        "stream": True,
    }
    expected |= {"max_tokens": 10 - len(ids)} | ({} if left is None else {"min_tokens": left})
    assert fields == expected
    assert (prompt.tokens, parsed.route, parsed.model) == (3 + len(ids), Route.COMPLETIONS, "tiny")
    assert parsed.adds_ids
    assert parsed.adds_usage


def test_ids_that_the_client_wants_are_asked_for() -> None:
    """They are its own then, and not removed."""
    parsed, _ = continued(kept(shows_ids=True), b"[1]", array("I", [2]), limit=3)
    assert bytes(parsed.fields["return_token_ids"]) == b"true"
    assert shows_ids(parsed)
    assert not parsed.adds_ids


def test_a_usage_that_the_client_wants_is_asked_for_in_its_words() -> None:
    """`stream_options` go on as they came."""
    sampling = b'{"stream_options":{"include_usage":true}}'
    parsed, _ = continued(
        kept(sampling=sampling, wants_usage=True, model=None), b"[1]", array("I", [2]), limit=3
    )
    assert bytes(parsed.fields["stream_options"]) == b'{"include_usage":true}'
    assert "model" not in parsed.fields
    assert not parsed.adds_usage


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=3)
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "text",
                    "delta",
                    "content",
                    "index",
                    "token_ids",
                    "usage",
                    "prompt_tokens",
                    "completion_tokens",
                ]
            )
            | st.sampled_from(
                ["prompt_tokens_details", "cached_tokens", "finish_reason", "prompt_token_ids"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON | st.binary(max_size=20), st.booleans())
def test_whatever_an_engine_sends(choices: Any, usage: Any, top: Any, chat: bool) -> None:
    """Events are rewritten, or are no events: nothing else is raised."""
    if isinstance(top, bytes):
        body = top.replace(b"\n", b"")
    else:
        body = json.dumps(
            {"id": top, "object": 1, "created": 2, "model": 3, "choices": choices, "usage": usage}
        ).encode()
    for read in (
        lambda: ContinuedEvents({}, is_chat=chat, done=3).event(sse.data(body)),
        lambda: LastEvent(sse.data(body)),
    ):
        with suppress(NotACompletionError):
            read()


def test_deep_nesting_is_no_completion() -> None:
    """A parser's recursion ends."""
    deep = b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(NotACompletionError):
        ContinuedEvents({}, is_chat=True, done=3).event(sse.data(deep))
    with pytest.raises(NotACompletionError):
        LastEvent(sse.data(deep))
