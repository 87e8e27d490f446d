"""`/cohere/v2/chat`: Cohere's chat as vLLM has it with VLLM_ENABLE_COHERE_API=1, for text and
thoughts.

Owns the translation to a chat and back. Source: vLLM 0.32.0 `entrypoints/cohere`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pdproxy_lab.sim import failed
from pdproxy_lab.sim.api.converted import as_chat
from pdproxy_lab.sim.api.errors import RefusedRequest
from pdproxy_lab.sim.api.protocol import INT64, ChatBody
from pdproxy_lab.sim.engine import SimEngine

_MAX_STOPS = 4
_FINISH = {"length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "error": "ERROR"}


class CohereMessage(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str | list[dict[str, Any]] | None = None


class CohereBody(BaseModel):
    """The body of `/cohere/v2/chat`."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    messages: list[CohereMessage]
    stream: bool | None = False
    max_tokens: int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    p: float | None = None
    logprobs: bool | None = None
    priority: Annotated[int, Field(**INT64)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model:
            raise RefusedRequest("model is required", "model")
        return model

    @field_validator("max_tokens")
    @classmethod
    def _not_negative(cls, limit: int | None) -> int | None:
        if limit is not None and limit < 0:
            raise RefusedRequest("max_tokens must be non-negative", "max_tokens", value=limit)
        return limit

    @field_validator("messages")
    @classmethod
    def _some(cls, messages: list[CohereMessage]) -> list[CohereMessage]:
        if not messages:
            raise RefusedRequest("messages must contain at least one message", "messages")
        return messages

    def chat(self) -> ChatBody:
        """The same request as a chat."""
        given: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": one.role, "content": one.content} for one in self.messages],
            "max_tokens": self.max_tokens,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.p,
            "top_k": self.k,
            "seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logprobs": self.logprobs,
            "return_token_ids": self.logprobs,
            "priority": self.priority,
            "kv_transfer_params": self.kv_transfer_params,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": self.stream or None,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        return ChatBody.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )


async def cohere_chat(
    engine: SimEngine, body: CohereBody, request: Request, date: Callable[[], str]
) -> Response:
    """Answer one request."""
    found = await as_chat(
        engine,
        body.chat(),
        request,
        date,
        whole=_whole,
        refused=lambda error: failed.of_cohere(error["message"], request_id(request)),
        events=partial(_events, version=engine.facts.version),
    )
    if found.status_code == 200 or not found.body:
        return found
    # vLLM's middleware sends an error again, with its headers in another order
    kind = {"content-type": found.headers["content-type"]}
    return Response(found.body, found.status_code, headers=kind)


def request_id(request: Request) -> str | None:
    """Return the id that an error names: the chat's, once its prompt was read, or the client's."""
    found: str | None = getattr(request.state, "answer_id", None)
    return found or request.headers.get("x-request-id")


def _finish(reason: str | None, stopped_by: int | str | None) -> str:
    if reason == "stop" and isinstance(stopped_by, str):
        return "STOP_SEQUENCE"
    return _FINISH.get(reason or "", "COMPLETE")


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    tokens = {
        "input_tokens": float(usage["prompt_tokens"]),
        "output_tokens": float(usage.get("completion_tokens") or 0),
    }
    found: dict[str, Any] = {"billed_units": tokens, "tokens": tokens}
    if details := usage.get("prompt_tokens_details"):
        found["cached_tokens"] = float(details["cached_tokens"])
    return found


def _whole(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's whole answer as Cohere's: fields that are None are left out."""
    (choice,) = chat["choices"]
    said = choice["message"]
    content = [
        {"type": kind, kind: said[key]}
        for kind, key in (("thinking", "reasoning"), ("text", "content"))
        if said[key]
    ]
    message = {"role": "assistant", "content": content} if content else {"role": "assistant"}
    made = {
        "id": chat["id"],
        "finish_reason": _finish(choice["finish_reason"], choice["stop_reason"]),
        "message": message,
        "usage": _usage(chat["usage"]),
    }
    if choice["logprobs"] and choice["token_ids"]:
        pairs = zip(choice["logprobs"]["content"], choice["token_ids"], strict=True)
        made["logprobs"] = [
            {"text": entry["token"], "token_ids": [token], "logprobs": [entry["logprob"]]}
            for entry, token in pairs
        ]
    if chat["kv_transfer_params"] is not None:
        made["kv_transfer_params"] = chat["kv_transfer_params"]
    return made


# -- streams


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode({**fields, "type": kind})


class _Blocks:
    """The content blocks of a stream."""

    def __init__(self) -> None:
        self._kind, self._index = "", -1

    def add(self, kind: str, text: str) -> Sequence[bytes]:
        """Return the events of a piece of text or of thoughts."""
        events: list[bytes] = []
        if kind != self._kind:
            events += self.close()
            self._kind, self._index = kind, self._index + 1
            # a Cohere block begins with its own kind of text, then its type
            begun = {"message": {"content": {kind: "", "type": kind}}}
            events.append(_event("content-start", index=self._index, delta=begun))
        delta = {"message": {"content": {kind: text}}}
        return [*events, _event("content-delta", index=self._index, delta=delta)]

    def close(self) -> Sequence[bytes]:
        """Return the event that ends the block that is open."""
        opened, self._kind = self._kind, ""
        return [_event("content-end", index=self._index)] if opened else []


async def _events(chunks: AsyncIterable[bytes], version: str) -> AsyncGenerator[bytes, None]:
    """Yield the events of Cohere's stream for those of a chat."""
    blocks, started = _Blocks(), False
    finish: str | None = None
    stopped_by: int | str | None = None
    async for data in chunks:
        if data == b"[DONE]":
            break
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            if started:
                for event in failed.in_cohere(version, chunk["error"], blocks.close()):
                    yield event
            break
        if not started:
            started = True
            opening = {"message": {"role": "assistant"}}
            yield _event("message-start", id=chunk["id"], delta=opening)
        if not chunk["choices"]:
            for event in blocks.close():
                yield event
            ending = {
                "finish_reason": _finish(finish, stopped_by),
                "usage": _usage(chunk["usage"]),
            }
            yield _event("message-end", id=chunk["id"], delta=ending)
            continue
        (choice,) = chunk["choices"]
        if choice["finish_reason"] is not None:
            finish, stopped_by = choice["finish_reason"], choice.get("stop_reason")
        for kind, key in (("thinking", "reasoning"), ("text", "content")):
            if text := choice["delta"].get(key):
                for event in blocks.add(kind, text):
                    yield event
    yield b"data: [DONE]\n\n"
