"""A first token put before another engine's completion: the client can't see the seam."""

# The expectations are what vLLM 0.32.0 says when one engine does it all (tests/data, and the field
# order of its answers).

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.contract import FirstToken, Handle
from pdproxy.transfer.splice import Splice
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route

USAGE = {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2}
ONE_ENGINE = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}


def splice(route: Route, first: FirstToken | None = None, **fields: Any) -> Splice:
    """A splice behind a prompt of three tokens and the token " a"."""
    prompt = (
        {"prompt": "abc"}
        if route is Route.COMPLETIONS
        else {"messages": [{"role": "user", "content": "abc"}]}
    )
    request = parse(route, json.dumps({"model": "tiny", **prompt, **fields}).encode())
    return Splice(
        request, Handle(b"", b"[5,6,7]", 3, "leg-1", first=first or FirstToken(42, " a")), "req-9"
    )


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    """An event of the decode engine's completion."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
    }
    choice |= {"prompt_token_ids": None, "token_ids": None} | more
    body = {
        "id": "cmpl-req-9",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [choice],
    }
    return json.dumps(body, separators=(",", ":")).encode()


def usage_event() -> bytes:
    """The decode engine's last event."""
    body = {
        "id": "cmpl-req-9",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [],
    }
    return json.dumps(
        body | {"usage": USAGE, "system_fingerprint": "f"}, separators=(",", ":")
    ).encode()


def shown(events: list[bytes]) -> list[Any]:
    """The events' JSON."""
    return [json.loads(one) for one in events]


def test_a_chat_stream() -> None:
    """The role, the first token, then the rest as chat chunks; the usage as of one engine. The
    relay takes the ids away.
    """
    rewritten = splice(Route.CHAT, stream=True)
    opening = shown(rewritten.events(event(" b")))
    top = {"id": "chatcmpl-req-9", "object": "chat.completion.chunk", "created": 7, "model": "tiny"}
    unfinished = {"logprobs": None, "finish_reason": None}
    assert opening == [
        {
            **top,
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, **unfinished}],
            "prompt_token_ids": [5, 6, 7],
            "prompt_text": None,
        },
        {
            **top,
            "choices": [{"index": 0, "delta": {"content": " a"}, **unfinished, "token_ids": [42]}],
        },
        {
            **top,
            "choices": [{"index": 0, "delta": {"content": " b"}, **unfinished, "token_ids": None}],
        },
    ]
    (last,) = shown(rewritten.events(event(" c", "length")))
    assert last["choices"] == [
        {
            "index": 0,
            "delta": {"content": " c"},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    (end,) = shown(rewritten.events(usage_event()))
    assert end == {**top, "choices": [], "usage": ONE_ENGINE, "system_fingerprint": "f"}


def test_the_fields_have_the_engines_order() -> None:
    """Bytes that others look for are where vLLM writes them."""
    events = splice(Route.CHAT, stream=True).events(event(" b"))
    assert events[0].startswith(
        b'{"id":"chatcmpl-req-9","object":"chat.completion.chunk","created":7,"model":"tiny",'
        b'"choices":'
        b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":'
        b'null}],"prompt_token_ids":['
    )
    assert events[1].endswith(
        b'"delta":{"content":" a"},"logprobs":null,"finish_reason":null,"token_ids":[42]}]}'
    )


def test_a_completion_stream_with_ids() -> None:
    """The prompt's ids stand in the first event, without the token that isn't the prompt's; each
    event has its own.
    """
    rewritten = splice(Route.COMPLETIONS, stream=True, return_token_ids=True)
    events = shown(rewritten.events(event(" b", prompt_token_ids=[5, 6, 7, 42], token_ids=[43])))
    choices = [one["choices"][0] for one in events]
    assert [choice["text"] for choice in choices] == [" a", " b"]
    assert [choice["token_ids"] for choice in choices] == [[42], [43]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7], None]
    assert all(one["id"] == "cmpl-req-9" for one in events)


def test_a_chat_stream_with_ids() -> None:
    """The prompt's ids stand at the top of the role's event."""
    rewritten = splice(Route.CHAT, stream=True, return_token_ids=True)
    role, first, second = shown(
        rewritten.events(event(" b", prompt_token_ids=[5, 6, 7, 42], token_ids=[43]))
    )
    assert role["prompt_token_ids"] == [5, 6, 7]
    assert first["choices"][0]["token_ids"] == [42]
    assert second["choices"][0]["token_ids"] == [43]


def test_an_empty_list_of_choices_opens_nothing() -> None:
    """A usage that comes first is no data: the opening waits for the first choice."""
    rewritten = splice(Route.CHAT, stream=True)
    assert len(rewritten.events(usage_event())) == 1
    assert len(rewritten.events(event(" b"))) == 3


def test_an_error_event_is_left_alone() -> None:
    """Others look at it."""
    error = b'{"error":{"message":"no","type":"x","param":null,"code":500}}'
    assert splice(Route.CHAT).events(error) == [error]


def whole(text: str, ids: list[int] | None = None, **more: Any) -> bytes:
    """The decode engine's whole answer."""
    choice = json.loads(event(text, "length", token_ids=ids))["choices"][0] | {
        "prompt_logprobs": None
    }
    body = {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [choice],
    }
    body |= {
        "service_tier": None,
        "system_fingerprint": "f",
        "usage": USAGE,
        "kv_transfer_params": None,
    } | more
    return json.dumps(body).encode()


def test_a_whole_chat() -> None:
    """One message, the token in front, the usage as of one engine."""
    body = json.loads(splice(Route.CHAT).whole(whole(" b c")))
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-req-9"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == " a b c"
    assert choice["message"]["role"] == "assistant"
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", None)
    assert body["usage"] == ONE_ENGINE
    assert list(body)[:8] == [
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
    ]
    assert "text" not in choice


@pytest.mark.parametrize(("ids", "shown_ids"), [([43, 44], [42, 43, 44]), ([], [42])])
def test_a_whole_completion_with_ids(ids: list[int], shown_ids: list[int]) -> None:
    """The first token's id leads the ids."""
    body = json.loads(splice(Route.COMPLETIONS, return_token_ids=True).whole(whole(" b", ids)))
    (choice,) = body["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == (
        " a b",
        shown_ids,
        [5, 6, 7],
    )


PREFILLED = whole(
    " a",
    usage={"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1},
    kv_transfer_params={"first_tok": 42},
)


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_stream_of_one_token(finish: str) -> None:
    """The prefill engine's answer alone makes a stream: the role, the token with its finish, the
    usage.
    """
    first = FirstToken(42, " a", finish, b"7")
    role, token, end = shown(
        splice(Route.CHAT, first, stream=True, return_token_ids=True).finished_events(PREFILLED)
    )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert token["choices"][0]["delta"] == {"content": " a"}
    assert (token["choices"][0]["finish_reason"], token["choices"][0]["stop_reason"]) == (finish, 7)
    assert token["choices"][0]["token_ids"] == [42]
    assert (end["choices"], end["system_fingerprint"]) == ([], "f")
    assert end["usage"] == {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}


def test_a_stream_of_one_token_leaves_out_what_is_null() -> None:
    """Whole answers spell it out, at every depth; streams of vLLM don't."""
    usage: dict[str, object] = {
        "prompt_tokens": 3,
        "total_tokens": 4,
        "completion_tokens": 1,
        "completion_tokens_details": None,
    }
    usage["prompt_tokens_details"] = {"cached_tokens": 0, "created_cache_tokens": None}
    body = whole(" a", usage=usage)
    *_, end = shown(
        splice(Route.COMPLETIONS, FirstToken(42, " a", "stop"), stream=True).finished_events(body)
    )
    assert end["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "completion_tokens_details" not in end["usage"]


def test_a_whole_answer_of_one_token() -> None:
    """Nothing of the transfer is left in it."""
    body = json.loads(
        splice(Route.COMPLETIONS, FirstToken(42, " a", "length")).finished_whole(PREFILLED)
    )
    assert body["kv_transfer_params"] is None
    assert body["id"] == "cmpl-req-9"
    assert body["choices"][0]["text"] == " a"
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("bad", [b"", b"[]", b"nonsense", b'{"choices":5}', b'{"choices":[5]}'])
def test_nonsense_is_told(bad: bytes) -> None:
    """What is no completion is no answer."""
    for ask in (
        splice(Route.CHAT).events,
        splice(Route.CHAT).whole,
        splice(Route.CHAT).finished_whole,
    ):
        with pytest.raises(NotACompletionError):
            ask(bad)
    with pytest.raises(NotACompletionError):
        splice(Route.CHAT, FirstToken(1, "a", "stop")).finished_events(bad)
