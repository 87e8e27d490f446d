"""A server on loopback that answers chats, completions, Responses and Messages by a script, and
keeps every request.

A client's base URL has two names before the API's path: `/CLIENT@VERSION/CASE/v1/...`. The answers
depend on the request alone. A request with tools gets one call of a tool, then two calls at once,
then text: a client that goes on by itself sends all three. A request with a schema for its answer
gets JSON of that schema.
"""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.clients.examples import Call, calls_for, example

TEXT = "The tide is high at noon."
THOUGHT = "The user asks for the tide."
MODEL = "tiny"
HEADERS = ("anthropic-beta", "anthropic-version", "content-encoding", "openai-beta")
"""Headers by which a server may answer in another way."""


@dataclass
class Recorded:
    """One request as it came. `client` has its version behind an @."""

    client: str
    case: str
    route: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Stub:
    """The server. `requests`: what generating routes got, in order; `others`: the paths of all
    other requests.
    """

    requests: list[Recorded] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    port: int = 0
    _runner: web.AppRunner | None = None
    _ids: dict[tuple[str, str], itertools.count[int]] = field(
        default_factory=lambda: collections.defaultdict(itertools.count)
    )
    """A number for each answer to a case: what a client sends back is the same each time."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Stub:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/", 3)
        made = {
            "v1/chat/completions": _chat,
            "v1/completions": _completion,
            "v1/responses": _response,
            "v1/messages": _message,
        }.get(parts[3] if len(parts) == 4 else "")
        if request.method != "POST" or made is None:
            self.others.append(f"{request.method} {request.path}")
            if request.path.endswith("/v1/models"):
                return web.json_response({"object": "list", "data": [_card()]})
            if request.path.endswith("/count_tokens"):
                return web.json_response({"input_tokens": 20})
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        body = json.loads(_plain(await request.read(), request.headers.get("content-encoding", "")))
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        self.requests.append(Recorded(parts[1], parts[2], f"/{parts[3]}", headers, body))
        answer, events = made(body, next(self._ids[parts[1], parts[2]]))
        if body.get("stream") is not True:
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for name, event in events:
            head = f"event: {name}\n" if name else ""
            text = event if isinstance(event, str) else json.dumps(event)
            await stream.write(f"{head}data: {text}\n\n".encode())
        return stream


Events = list[tuple[str, Any]]


def _plain(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip" or body[:2] == b"\x1f\x8b":
        return gzip.decompress(body)
    return zlib.decompress(body) if encoding == "deflate" else body


def _card() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 1, "owned_by": "x", "max_model_len": 131072}


def _said(format_: Any) -> str:
    """The text of an answer: by a schema, if the request has one."""
    if not isinstance(format_, dict):
        return TEXT
    schema = format_.get("schema") or (format_.get("json_schema") or {}).get("schema")
    if schema is not None:
        return json.dumps(example(schema))
    return "{}" if format_.get("type") == "json_object" else TEXT


def _functions(tools: Any) -> list[tuple[str, dict[str, Any], str]]:
    """The functions among the tools of any API: name, schema, and the type of the tool."""
    found = []
    for tool in tools or ():
        inner = tool.get("function") or tool
        schema = inner.get("parameters") or tool.get("input_schema") or {}
        kind = tool.get("type") or "function"
        if inner.get("name") and (kind in ("function", "custom") or "input_schema" in tool):
            found.append((inner["name"], schema, kind))
    return found


def _chat(body: dict[str, Any], number: int) -> tuple[dict[str, Any], Events]:
    results = sum(one.get("role") in ("tool", "function") for one in body["messages"])
    calls = calls_for(_functions(body.get("tools")), results, body.get("tool_choice"), number)
    text = None if calls else _said(body.get("response_format"))
    base = {"id": f"chatcmpl-{number}", "created": 1, "model": body.get("model", MODEL)}
    usage = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
    listed = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.json}}
        for one in calls
    ]
    message = {"role": "assistant", "content": text, "reasoning": THOUGHT, "tool_calls": listed}
    finish = "tool_calls" if calls else "stop"
    logprobs = {"content": [_logprob()]} if body.get("logprobs") else None
    choices = [
        {"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs}
        for index in range(body.get("n") or 1)
    ]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"reasoning": THOUGHT}]
    deltas += [{"content": word} for word in _words(text)]
    for index, call in enumerate(listed):
        function = call["function"]
        head = {"name": function["name"], "arguments": ""}  # type: ignore[index]
        deltas.append({"tool_calls": [{**call, "index": index, "function": head}]})
        arguments = {"arguments": function["arguments"]}  # type: ignore[index]
        deltas.append({"tool_calls": [{"index": index, "function": arguments}]})
    chunk = base | {"object": "chat.completion.chunk"}
    events: Events = [
        ("", chunk | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        for delta in deltas
        for index in range(len(choices))
    ]
    events += [
        ("", chunk | {"choices": [{"index": index, "delta": {}, "finish_reason": finish}]})
        for index in range(len(choices))
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(("", chunk | {"choices": [], "usage": usage}))
    whole = base | {"object": "chat.completion", "choices": choices, "usage": usage}
    return whole, [*events, ("", "[DONE]")]


def _logprob() -> dict[str, Any]:
    return {"token": TEXT, "logprob": -0.1, "bytes": None, "top_logprobs": []}


def _completion(body: dict[str, Any], number: int) -> tuple[dict[str, Any], Events]:
    base = {"id": f"cmpl-{number}", "object": "text_completion", "created": 1, "model": MODEL}
    usage = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    count = (len(prompts) if isinstance(prompts[0], (str, list)) else 1) * (body.get("n") or 1)
    choices = [
        {"index": index, "text": TEXT, "finish_reason": "stop", "logprobs": None}
        for index in range(count)
    ]
    events: Events = [("", base | {"choices": [one]}) for one in choices]
    return base | {"choices": choices, "usage": usage}, [*events, ("", "[DONE]")]


def _response(body: dict[str, Any], number: int) -> tuple[dict[str, Any], Events]:
    given = body.get("input")
    items = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    results = sum(str(one.get("type", "")).endswith("_output") for one in items)
    calls = calls_for(_functions(body.get("tools")), results, body.get("tool_choice"), number)
    output: list[dict[str, Any]] = [
        {
            "type": "reasoning",
            "id": f"rs_{number}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": THOUGHT}],
            "encrypted_content": None,
            "status": "completed",
        }
    ]
    for call in calls:
        if call.kind == "custom":
            made = {"type": "custom_tool_call", "input": "print(1)"}
        else:
            made = {"type": "function_call", "arguments": call.json}
        made |= {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        output.append({**made, "status": "completed"})
    if not calls:
        text = _said((body.get("text") or {}).get("format"))
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    whole = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": body.get("model", MODEL),
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 27,
        },
    }
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    events: Events = [("response.created", {"response": begun})]
    events.append(("response.in_progress", {"response": begun}))
    for index, item in enumerate(output):
        events += _item_events(index, item)
    events.append(("response.completed", {"response": whole}))
    return whole, [
        (name, event | {"type": name, "sequence_number": at})
        for at, (name, event) in enumerate(events)
    ]


def _item_events(index: int, item: dict[str, Any]) -> Events:
    at = {"output_index": index, "item_id": item["id"]}
    empty = item | {"status": "in_progress"}
    empty |= {
        name: [] if name == "content" else ""
        for name in ("content", "arguments", "input")
        if name in item
    }
    events: Events = [("response.output_item.added", at | {"item": empty})]
    if item["type"] == "function_call":
        name, text = "response.function_call_arguments", item["arguments"]
        events += [(f"{name}.delta", at | {"delta": text})]
        events += [(f"{name}.done", at | {"arguments": text, "name": item["name"]})]
    elif item["type"] == "custom_tool_call":
        name, text = "response.custom_tool_call_input", item["input"]
        events += [(f"{name}.delta", at | {"delta": text}), (f"{name}.done", at | {"input": text})]
    else:
        part = item["content"][0]
        at_part = at | {"content_index": 0}
        name = f"response.{part['type']}"
        extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        events.append(("response.content_part.added", at_part | {"part": part | {"text": ""}}))
        events += [
            (f"{name}.delta", at_part | extra | {"delta": word}) for word in _words(part["text"])
        ]
        events.append((f"{name}.done", at_part | extra | {"text": part["text"]}))
        events.append(("response.content_part.done", at_part | {"part": part}))
    return [*events, ("response.output_item.done", at | {"item": item})]


def _message(body: dict[str, Any], number: int) -> tuple[dict[str, Any], Events]:
    blocks = [
        block
        for one in body["messages"]
        for block in (one["content"] if isinstance(one["content"], list) else ())
    ]
    results = sum(block.get("type") == "tool_result" for block in blocks)
    calls = calls_for(_functions(body.get("tools")), results, body.get("tool_choice"), number)
    content: list[dict[str, Any]] = []
    if (body.get("thinking") or {}).get("type") in ("enabled", "adaptive"):
        content.append({"type": "thinking", "thinking": THOUGHT, "signature": "c2lnbmVk"})
    if calls:
        content += [_use(call) for call in calls]
    else:
        given = (body.get("output_config") or {}).get("format") or body.get("output_format")
        content.append({"type": "text", "text": _said(given)})
    whole = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", MODEL),
        "content": content,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 20, "output_tokens": 7},
    }
    begun = whole | {"content": [], "stop_reason": None}
    events: Events = [("message_start", {"message": begun})]
    for index, block in enumerate(content):
        kind = block["type"]
        if kind == "tool_use":
            empty, deltas = block | {"input": {}}, []
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        elif kind == "thinking":
            empty = {"type": kind, "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block[kind]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            empty = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": word} for word in _words(block["text"])]
        events.append(("content_block_start", {"index": index, "content_block": empty}))
        events += [("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]
        events.append(("content_block_stop", {"index": index}))
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append(("message_delta", {"delta": end, "usage": {"output_tokens": 7}}))
    events.append(("message_stop", {}))
    return whole, [(name, event | {"type": name}) for name, event in events]


def _use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _words(text: str | None) -> list[str]:
    half = len(text) // 2 if text else 0
    return [part for part in ((text or "")[:half], (text or "")[half:]) if part]
