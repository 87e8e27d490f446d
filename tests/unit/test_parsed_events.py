"""Chat events of derendered token ids: what is asked for, what becomes of the answers, and what
hostile engines send.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.serving.dispatch.continuing import _lens
from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.continued_events import ContinuedEvents, LastEvent
from pdproxy.transfer.parsed_events import ParsedEvents, TooManyTokensError, why_not
from pdproxy.wire.continuable import Continuable, NotContinued
from pdproxy.wire.route import Route
from pdproxy.wire.tool_calls import ids_in

LAST = LastEvent(
    b'data: {"id":"a","object":"chat.completion.chunk","created":5,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


def made(
    *, most: int = 1000, shows_stop: bool = False, calls: tuple[str, ...] = ()
) -> ParsedEvents:
    kept = Continuable(Route.CHAT, "m", b"{}", 64, 0, (), shows_stop, True)
    plain = ContinuedEvents(LAST.shown, is_chat=True, done=2)
    return ParsedEvents(
        plain,
        LAST.shown,
        kept,
        b'{"messages":[]}',
        b"[1, 2, 3]",
        array("I", [7, 8]),
        [2],
        calls,
        most,
    )


def event(ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {
        "index": 0,
        "text": "unused",
        "token_ids": ids,
        "finish_reason": finish,
        "stop_reason": None,
    }
    body = {"id": "b", "created": 6, "choices": [choice | more.pop("choice", {})]} | more
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def answer(**delta: Any) -> bytes:
    """What derender returns, with all its nulls."""
    nulls = {"role": None, "content": None, "reasoning": None}
    chunk = {
        "id": "c",
        "created": 9,
        "choices": [{"index": 0, "delta": nulls | delta, "finish_reason": "tool_calls"}],
    }
    return json.dumps({"chunk": chunk, "stream_state": {"output_token_ids": [1]}}).encode()


def asked(events: ParsedEvents) -> Any:
    body = events.call()
    assert body is not None
    return json.loads(body)


def shown(data: bytes) -> Any:
    return json.loads(data.removeprefix(b"data: "))


def call(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "index": index,
        "id": None,
        "type": None,
        "function": {"name": None, "arguments": "{"},
    } | fields


def test_a_call_may_return_more_the_more_tokens_it_is_about() -> None:
    events = made()
    before = events.max_answer
    events.take(event([20]))
    asked(events)
    assert events.max_answer > before
    events.answered(answer(content="a"))
    assert events.max_answer > before


def test_one_call_after_another() -> None:
    events = made()
    assert events.call() is None
    events.take(b": ping\n\n" + event([20]) + event(None))
    events.take(event([21]))
    assert asked(events) == {
        "stream": True,
        "model": "m",
        "prompt_token_ids": [1, 2, 3],
        "chat_request": {"messages": []},
        "generate_chunk": {"choices": [{"index": 0, "token_ids": [20, 21], "finish_reason": None}]},
        "stream_state": {
            "role_sent": True,
            "output_token_ids": [7, 8],
            "output_chunk_lens": [2],
            "tools_streamed": False,
            "last_tool_call_ids": [],
        },
    }
    events.take(event([22]))
    found = shown(events.answered(answer(content="héllo")))
    choice = {
        "index": 0,
        "delta": {"content": "héllo"},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": None,
    }
    assert found == json.loads(
        b"{%b}" % b'"id":"a","object":"chat.completion.chunk","created":5,"model":"m"'
    ) | {"choices": [choice]}
    second = asked(events)
    assert second["generate_chunk"]["choices"][0]["token_ids"] == [22]
    assert second["stream_state"]["output_token_ids"] == [7, 8, 20, 21]
    assert second["stream_state"]["output_chunk_lens"] == [2, 2]
    assert events.answered(answer()) == b"", "the parser holds it back"
    assert events.call() is None


@pytest.mark.parametrize(
    ("finish", "stop_reason", "shows_stop", "ids"),
    [
        ("stop", None, False, [20]),
        ("stop", 151645, False, [20]),
        ("stop", None, True, [20, 2]),
        ("stop", "zz", False, [20, 2]),
        ("length", None, False, [20, 2]),
    ],
)
def test_an_end_token_is_not_parsed(
    finish: str, stop_reason: Any, shows_stop: bool, ids: list[int]
) -> None:
    """Derender would show it."""
    events = made(shows_stop=shows_stop)
    events.take(event([20, 2], finish, choice={"stop_reason": stop_reason}) + DONE)
    assert asked(events)["generate_chunk"]["choices"][0] == {
        "index": 0,
        "token_ids": ids,
        "finish_reason": finish,
    }
    (choice,) = shown(events.answered(answer()))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop_reason), (
        "not what derender says"
    )
    assert events.call() is None
    assert events.rest() == DONE


@pytest.mark.parametrize(("finish", "told"), [("stop", "tool_calls"), ("length", "length")])
def test_the_finish_reason_behind_a_call(finish: str, told: str) -> None:
    events = made(calls=("mine",))
    events.take(event([20], finish))
    state = asked(events)["stream_state"]
    assert (state["tools_streamed"], state["last_tool_call_ids"]) == (True, ["mine"])
    delta = {"tool_calls": [call(), call(id="other"), call(1, id="new", type="function")]}
    (choice,) = shown(events.answered(answer(**delta)))["choices"]
    assert choice["finish_reason"] == told
    assert choice["delta"]["tool_calls"] == [
        {"index": 0, "function": {"arguments": "{"}},
        {"index": 0, "id": "mine", "function": {"arguments": "{"}},
        {"index": 1, "id": "new", "type": "function", "function": {"arguments": "{"}},
    ]


def test_an_end_that_comes_while_a_call_is_under_way() -> None:
    """It is of the next call, without ids: a parser may still hold something back."""
    events = made()
    events.take(event([20]))
    asked(events)
    events.take(event([2], "stop", system_fingerprint="f") + DONE)
    assert shown(events.answered(answer(content="a")))["choices"][0]["finish_reason"] is None
    assert asked(events)["generate_chunk"]["choices"][0] == {
        "index": 0,
        "token_ids": [],
        "finish_reason": "stop",
    }
    last = shown(events.answered(answer(content="b")))
    assert (last["choices"][0]["delta"], last["system_fingerprint"]) == ({"content": "b"}, "f")
    assert last["choices"][0]["finish_reason"] == "stop"


def test_the_usage_counts_the_whole_answer() -> None:
    usage = {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4}
    events = made()
    events.take(event([20], usage=usage))
    events.take(
        b"data: "
        + json.dumps({"id": "b", "created": 1, "choices": [], "usage": usage}).encode()
        + b"\n\n"
        + DONE
    )
    asked(events)
    counts = {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}
    assert shown(events.answered(answer(content="a")))["usage"] == counts | {
        "completion_tokens_details": None
    }
    assert events.call() is None
    assert shown(events.rest().removesuffix(DONE))["usage"] == counts


@given(st.lists(st.integers(0, 9), max_size=30), st.data())
def test_all_ids_are_asked_for_once(lengths: list[int], data: st.DataObject) -> None:
    """However events and calls interleave: the state has what earlier calls had."""
    events = made()
    sent: list[int] = []
    seen: list[int] = []
    pending = False

    def ask() -> bool:
        body = events.call()
        if body is None:
            return False
        found = json.loads(body)
        assert found["stream_state"]["output_token_ids"] == [7, 8, *seen]
        assert sum(found["stream_state"]["output_chunk_lens"]) == 2 + len(seen)
        assert all(found["stream_state"]["output_chunk_lens"])
        seen.extend(found["generate_chunk"]["choices"][0]["token_ids"])
        return True

    for number, length in enumerate(lengths):
        ids = [100 * number + place for place in range(length)]
        sent += ids
        events.take(event(ids))
        if pending and data.draw(st.booleans()):
            events.answered(answer(content="a"))
            pending = False
        if not pending:
            pending = ask()
    while pending:
        events.answered(answer(content="a"))
        pending = ask()
    assert seen == sent


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {\n\n",
        b'data: {"choices":{}}\n\n',
        b'data: {"id":1}\n\n',
        event([1], choice={"token_ids": "x"}),
        event([1.5]),  # type: ignore[list-item]
        event([1], choice={"finish_reason": 7}),
        event([1], "stop") + event([2]),
        event([1], usage=5),
        event([1], usage={"prompt_tokens": "x"}),
        b'data: {"choices":[],"usage":null}\n\n' * 9999,
        b"data: " + b"[" * 5000 + b"\n\n",
    ],
)
def test_what_is_no_completion(bad: bytes) -> None:
    with pytest.raises(NotACompletionError):
        made().take(bad)


def test_an_answer_that_becomes_too_long() -> None:
    with pytest.raises(TooManyTokensError):
        made().take(event([1] * 999))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{}",
        b'{"chunk":{"choices":[]}}',
        b'{"chunk":{"choices":[{"delta":{}},{"delta":{}}]}}',
        b'{"chunk":{"choices":[{"delta":{"content":7}}]}}',
        b'{"chunk":{"choices":[{"delta":{"tool_calls":[{}]}}]}}',
        b'{"chunk":{"choices":[{"delta":{"tool_calls":[{"index":200}]}}]}}',
        b'{"chunk":{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"'
        + b"x" * 300
        + b'"}]}}]}}',
        b"[" * 5000,
    ],
)
def test_what_is_no_derendered_event(bad: bytes) -> None:
    events = made()
    events.take(event([20]))
    asked(events)
    with pytest.raises(NotACompletionError):
        events.answered(bad)


RENDERED = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "max_tokens": 200,
    "output_kind": 1,
    "skip_clone": True,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
}
"""What an engine with vLLM 0.32 shows of a chat that asks for a stream and for nothing else."""


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (RENDERED, None),
        ({"temperature": 0.6, "top_k": 20, "stop": [], "bad_words": [], "max_tokens": 5}, None),
        ({"structured_outputs": None, "presence_penalty": 0.0}, None),
        ({"structured_outputs": {"structural_tag": "x"}}, NotContinued.GRAMMAR),
        ({"presence_penalty": 1.5}, NotContinued.PENALTY),
        ({"bad_words": ["a"]}, NotContinued.BAD_WORDS),
        ({"seed": 7}, NotContinued.SEED),
        ({"of_tomorrow": 1}, NotContinued.UNKNOWN_FIELD),
    ],
)
def test_what_a_rendered_chat_shows(params: dict[str, Any], reason: NotContinued | None) -> None:
    assert why_not(json.dumps({"token_ids": [1], "sampling_params": params}).encode()) is reason


def test_a_rendered_chat_that_is_none() -> None:
    assert why_not(b"{}") is why_not(b"[") is NotContinued.DERENDER


@given(st.lists(st.integers(1, 4), max_size=40))
def test_how_many_ids_each_event_had(lens: list[int]) -> None:
    several: list[int] = []
    at = 0
    for one in lens:
        several += [at, one] if one > 1 else []
        at += one
    assert _lens(at, several) == lens


@pytest.mark.parametrize("several", [[3, 9], [4, 2, 1, 2], [11, 2]])
def test_events_that_do_not_fit_the_ids(several: list[int]) -> None:
    assert _lens(10, several) is None


@pytest.mark.parametrize(
    ("batch", "ids"),
    [
        (
            b'data: {"choices":[{"delta":{"tool_calls":[{"id":"a","index":0},{"index":1}]}}]}\n\n',
            ["a"],
        ),
        (b'data: {"choices":[{"delta":{"content":"\\"tool_calls\\""}}]}\n\n', []),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"id":7}]}}]}\n\n', None),
        (b'data: {"tool_calls"\n\n', None),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"id":"' + b"a" * 300 + b'"}]}}]}\n\n', None),
        (
            b'data: {"choices":[{"delta":{"tool_calls":['
            + b",".join([b'{"id":"a"}'] * 200)
            + b"]}}]}\n\n",
            None,
        ),
    ],
)
def test_ids_of_calls(batch: bytes, ids: list[str] | None) -> None:
    assert ids_in(batch) == ids
