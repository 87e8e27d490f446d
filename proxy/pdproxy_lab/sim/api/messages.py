"""`/v1/messages`: Anthropic's Messages API as vLLM has it, for messages of text.

Owns the order of a stream's events. Generation itself is the chat route's.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, field_validator

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.chat import chat_prompt
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.generation import deltas
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.api.sampling import admit, check_lengths, sampling_params
from pdproxy_lab.sim.engine import SimEngine

_STOP = {"stop": "end_turn", "length": "max_tokens"}


class Message(BaseModel):
    """One message."""

    role: str
    content: str | list[dict[str, Any]]


class CountBody(BaseModel):
    """The body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model:
            raise ValueError("Model is required")
        return model

    def chat(self, **fields: Any) -> ChatBody:
        """The same request as a chat."""
        messages = [{"role": one.role, "content": _text(one.content)} for one in self.messages]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        return ChatBody.model_validate({"model": self.model, "messages": messages, **fields})


class MessagesBody(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = False
    temperature: float | None = None
    stop_sequences: list[str] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


def _text(content: str | list[dict[str, Any]]) -> str:
    return (
        content
        if isinstance(content, str)
        else "".join(str(part.get("text", "")) for part in content)
    )


def refused(error: RefusedRequest, version: str) -> Response:
    """Return a refusal in Anthropic's shape; `version`: vLLM's."""
    kind = since.message_error(version, error.kind, error.status)
    return response({"type": "error", "error": {"type": kind, "message": str(error)}}, error.status)


async def count(engine: SimEngine, body: CountBody, date: Callable[[], str]) -> Response:
    """Count a message's tokens."""
    try:
        answer.check_model(body.model, engine)
        tokens = len(chat_prompt(engine, body.chat(), date).ids)
    except RefusedRequest as error:
        return refused(error, engine.facts.version)
    return response(
        {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
    )


async def message(
    engine: SimEngine, body: MessagesBody, _: Request, date: Callable[[], str]
) -> Response:
    """Answer one request.

    Raises:
        EngineDeadError, LoadFailedError: for the caller to answer.
    """
    given: dict[str, Any] = {
        "max_completion_tokens": body.max_tokens,
        "temperature": body.temperature,
    }
    given |= {
        "stop": body.stop_sequences,
        "kv_transfer_params": body.kv_transfer_params,
        "cache_salt": body.cache_salt,
    }
    try:
        answer.check_model(body.model, engine)
        chat = body.chat(**{name: value for name, value in given.items() if value is not None})
        check_lengths(chat, engine.facts)
        prompt = chat_prompt(engine, chat, date)
        params = sampling_params(chat, prompt.ids, engine.facts, engine.tokenizer)
        admit(params, chat, prompt.ids, engine.facts, engine.tokenizer)
    except RefusedRequest as error:
        return refused(error, engine.facts.version)
    name = f"chatcmpl-{secrets.token_hex(8)}"
    used = len(prompt.ids)
    found = deltas(engine, name, [prompt], [params], chat, numbered=False)
    head = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": engine.facts.model,
    }

    async def events() -> AsyncGenerator[bytes, None]:
        made, reason, opened = 0, None, False
        async with aclosing(found) as all_of_them:
            async for delta in all_of_them:
                if not made:
                    start = {
                        **head,
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": _usage(used, 0),
                    }
                    yield _event("message_start", message=start)
                made += len(delta.tokens)
                if delta.text and not opened:
                    opened = True
                    yield _event(
                        "content_block_start", index=0, content_block={"type": "text", "text": ""}
                    )
                if delta.text:
                    yield _event(
                        "content_block_delta",
                        index=0,
                        delta={"type": "text_delta", "text": delta.text},
                    )
                reason = delta.finish_reason
        if opened:
            yield _event("content_block_stop", index=0)
        ending = {"stop_reason": _STOP.get(reason or "stop", "end_turn"), "stop_sequence": None}
        yield _event("message_delta", delta=ending, usage=_usage(used, made))
        yield _event("message_stop")

    if body.stream:
        return StreamingResponse(events(), media_type="text/event-stream")
    text, made, reason = "", 0, None
    async with aclosing(found) as all_of_them:
        async for delta in all_of_them:
            text, made, reason = text + delta.text, made + len(delta.tokens), delta.finish_reason
    content = [{"type": "text", "text": text}]
    stop = _STOP.get(reason or "stop", "end_turn")
    return response({**head, "content": content, "stop_reason": stop, "usage": _usage(used, made)})


def _usage(used: int, made: int) -> dict[str, int]:
    return {"input_tokens": used, "output_tokens": made}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        msgspec.json.encode({"type": kind, **fields}),
    )
