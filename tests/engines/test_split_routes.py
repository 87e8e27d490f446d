"""Responses and Messages are answered as by one plain engine, and their prompts' KV moves from P to
D.
"""

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from .client import ask
from .engine import MODEL
from .equality import Increases, Moved, in_full
from .fleet import Fleet
from .prompts import FORGED, SCHEMA, STORY, story
from .proxy import Proxy
from .test_equality import EVERY
from .test_other_routes import content_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {
    "type": "function",
    "name": "forecast",
    "description": "Ask for the forecast.",
    "parameters": SCHEMA,
    "strict": True,
}
TOOL = {"name": "forecast", "description": "Ask for the forecast.", "input_schema": SCHEMA}
CALLED = [
    {"role": "user", "content": "What is the weather?"},
    {"type": "function_call", "call_id": "a", "name": "forecast", "arguments": '{"city":"Oslo"}'},
    {"type": "function_call_output", "call_id": "a", "output": "rain"},
]
WET = [{"type": "text", "text": "wet"}]
USED = [
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "a", "name": "forecast", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "a",
                "content": [{"type": "text", "text": "wet"}],
            },
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
STREAM = {"stream": True}


def said(nonce: str) -> list[dict[str, Any]]:
    """A conversation whose first words are the nonce."""
    return [{"role": "user", "content": story(nonce)}]


RESPONSES_FIELDS: dict[str, dict[str, Any]] = {
    "text": {},
    "stream": STREAM,
    "instructions": {"instructions": f"{STORY} Be brief."},
    "limit-one": {"max_output_tokens": 1, **STREAM},
    "truncated": {"truncation": "auto"},
    "store": {"store": True, "metadata": {"a": "b"}, "user": "u"},
    "stored-not": {"store": False, **STREAM},
    "tools": {"tools": [FUNCTION], **STREAM},
    "tools-whole": {"tools": [FUNCTION], "tool_choice": "none"},
    "web-search": {"tools": [FUNCTION, {"type": "web_search"}], **STREAM},
    "schema": {"text": {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}},
    "sampled": {"temperature": 1, "seed": 7, "top_p": 0.9, **STREAM},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "own-id": {"request_id": "resp_0123456789abcdef"},
    "handle": {"kv_transfer_params": FORGED, "vllm_xargs": {"a": 1}},
    "salt": {"cache_salt": "pepper", **STREAM},
    "reasoning": {"reasoning": {"effort": "low"}, "include_reasoning": False, **STREAM},
}
MESSAGES_FIELDS: dict[str, dict[str, Any]] = {
    "text": {},
    "stream": STREAM,
    "system": {"system": [{"type": "text", "text": f"{STORY} Be brief."}], **STREAM},
    "limit-one": {"max_tokens": 1, **STREAM},
    "tools": {"tools": [TOOL], **STREAM},
    "tools-whole": {"tools": [TOOL], "tool_choice": {"type": "none"}},
    "stops": {"stop_sequences": ["e", "harbour"], **STREAM},
    "fields": {"top_k": 3, "top_p": 0.9, "metadata": {"user_id": "u"}},
    "salt": {"cache_salt": "pepper"},
    "handle": {"kv_transfer_params": FORGED, **STREAM},
    "effort": {"output_config": {"effort": "low"}},
    "thinking-off": {"thinking": {"type": "disabled"}, **STREAM},
}
SPLIT = [
    *((RESPONSES, name, fields) for name, fields in RESPONSES_FIELDS.items()),
    *((MESSAGES, name, fields) for name, fields in MESSAGES_FIELDS.items()),
]
ALONE: list[tuple[str, str, dict[str, Any]]] = [
    (RESPONSES, "built_in_tools", {"tools": [{"type": "web_search_preview"}]}),
    (RESPONSES, "echo", {"enable_response_messages": True}),
    (RESPONSES, "unusual", {"previous_response_id": "resp_nope"}),
    (RESPONSES, "unusual", {"background": True}),
    (RESPONSES, "unusual", {"max_output_tokens": 0}),
    (RESPONSES, "unusual", {"max_output_tokens": "x"}),
    (MESSAGES, "unusual", {"max_tokens": 0}),
    (MESSAGES, "unusual", {"max_tokens": None}),
    (MESSAGES, "unusual", {"messages": []}),
    (
        MESSAGES,
        "unusual",
        {"max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"model": "nope"}),
    (RESPONSES, {"temperature": "hot"}),
    (RESPONSES, {"temperature": -1, **STREAM}),
    (RESPONSES, {"input": "x " * 20_000}),
    (RESPONSES, {"tools": [{"type": "nope"}]}),
    (RESPONSES, {"text": {"format": {"type": "nope"}}}),
    (MESSAGES, {"model": "nope"}),
    (MESSAGES, {"temperature": "hot"}),
    (MESSAGES, {"temperature": -1, **STREAM}),
    (MESSAGES, {"messages": [{"role": "user", "content": "x " * 20_000}]}),
    (MESSAGES, {"tools": [{"name": 1}]}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1}}),
    (MESSAGES, {"tool_choice": {"type": "tool"}}),
]


def body_of(path: str, fields: dict[str, Any], more: list[dict[str, Any]] | None = None) -> Any:
    """A greedy request whose prompt no engine has in its cache."""
    nonce = secrets.token_hex(6)
    if path == RESPONSES:
        base = {"max_output_tokens": 12, "input": said(nonce) + (more or [])}
    else:
        base = {"max_tokens": 12, "messages": said(nonce) + (more or [])}
    made = {"model": MODEL, "temperature": 0, **base, **fields}
    return {name: value for name, value in made.items() if value is not None}


async def compared(fleet: Fleet, proxy: Proxy, path: str, body: Any) -> None:
    """Fail unless status, type and content equal the plain engine's."""
    headers = {"X-Request-Id": secrets.token_hex(8)}
    plain = await ask(fleet.plain.url, path, body, headers)
    ours = await ask(proxy.url, path, body, headers)
    assert (ours.status, ours.headers.get("Content-Type")) == (
        plain.status,
        plain.headers.get("Content-Type"),
    ), ours.body
    assert content_of(ours) == content_of(plain)
    assert ours.broken == plain.broken == ""


async def split(
    fleet: Fleet,
    proxy: Proxy,
    path: str,
    body: Any,
    moved: Callable[[Increases], bool] = in_full,
) -> None:
    """Fail unless the answer is equal, the KV moved as the connector moves it (D has computed
    nothing of the prompt), and P is free.
    """
    before = Moved.now(fleet, proxy, 1)
    await compared(fleet, proxy, path, body)
    await before.settled(lambda increases: moved(increases) and not increases["alone"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [(path, fields) for path, _, fields in SPLIT[::EVERY]],
    ids=[f"{path[4:]}-{name}" for path, name, _ in SPLIT[::EVERY]],
)
async def test_as_one_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, fields: dict[str, Any]
) -> None:
    """The answer is the plain engine's, and the KV has moved."""
    await split(fleet, proxy_1p1d, path, body_of(path, fields))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "more"), [(RESPONSES, CALLED), (MESSAGES, USED)])
async def test_turns_with_calls(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, more: list[dict[str, Any]], *, stream: bool
) -> None:
    """The same of a conversation with a call and its result."""
    fields = {"stream": stream, "tools": [FUNCTION if path == RESPONSES else TOOL]}
    await split(fleet, proxy_1p1d, path, body_of(path, fields, more))


@pytest.mark.parametrize(("path", "reason", "fields"), ALONE[::EVERY])
async def test_alone_as_one_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, reason: str, fields: dict[str, Any]
) -> None:
    """What can't be split is answered as by the plain engine, and counted with its reason."""
    before = proxy_1p1d.counters().sum("pdproxy_alone_total", reason=reason)
    await compared(fleet, proxy_1p1d, path, body_of(path, fields))
    assert proxy_1p1d.counters().sum("pdproxy_alone_total", reason=reason) == before + 1


@pytest.mark.parametrize(("path", "fields"), REFUSED[::EVERY])
async def test_refused_as_by_one_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, fields: dict[str, Any]
) -> None:
    """A refusal has the plain engine's words, and P holds nothing after it."""
    before = Moved.now(fleet, proxy_1p1d, 1)
    await compared(fleet, proxy_1p1d, path, body_of(path, fields))
    await before.settled(lambda _: True)
