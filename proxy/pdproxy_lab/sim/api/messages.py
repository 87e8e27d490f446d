"""`/v1/messages`: Anthropic's Messages API as vLLM has it, for text and thoughts.

Owns the translation to a chat and back.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pdproxy_lab.sim import failed
from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.chat import chat_prompt
from pdproxy_lab.sim.api.converted import as_chat
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.engine import SimEngine

_MAX_STOPS = 4


class Message(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ThinkingEnabled(BaseModel):
    """Thoughts with a budget."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1024)


class ThinkingDisabled(BaseModel):
    """No thoughts."""

    type: Literal["disabled"]


class ThinkingAdaptive(BaseModel):
    """As many thoughts as the model likes."""

    type: Literal["adaptive"]


Thinking = Annotated[
    ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive, Field(discriminator="type")
]


class CountBody(BaseModel):
    """The body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model:
            raise ValueError("Model is required")
        return model

    def chat(self, **fields: Any) -> ChatBody:
        """The same request as a chat; `fields` that are None are left out.

        Raises:
            Refused: a value is none that a chat may have.
        """
        messages = [{"role": one.role, "content": _content(one.content)} for one in self.messages]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _content(self.system)})
        kwargs = self.chat_template_kwargs
        if isinstance(self.thinking, ThinkingDisabled):
            kwargs = {"enable_thinking": False, **(kwargs or {})}
        fields["chat_template_kwargs"] = kwargs
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatBody.model_validate({"model": self.model, "messages": messages, **given})


class MessagesBody(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @field_validator("max_tokens")
    @classmethod
    def _some(cls, max_tokens: int) -> int:
        if max_tokens <= 0:
            raise ValueError("max_tokens must be positive")
        return max_tokens

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesBody:
        # a prefill leg has one token, and none of its own thoughts
        if (self.kv_transfer_params or {}).get("do_remote_decode"):
            return self
        if self._budget is not None and self._budget >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self

    @property
    def _budget(self) -> int | None:
        thinking = self.thinking
        return thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None

    def whole_chat(self) -> ChatBody:
        """The same request as a chat, with all its fields.

        Raises:
            Refused: a value is none that a chat may have.
        """
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return self.chat(
            max_tokens=self.max_tokens,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
            ec_transfer_params=self.ec_transfer_params,
            vllm_xargs=self.vllm_xargs,
            thinking_token_budget=self._budget,
            stream=self.stream or None,
            stream_options=usage if self.stream else None,
        )


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a message's content for a chat: its text, or its parts where some are images."""
    if isinstance(content, str):
        return content
    if any(part.get("type") == "image" for part in content):
        return [_part(part) for part in content]
    return "".join(str(part.get("text", "")) for part in content)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
        return {"type": "text", "text": str(part.get("text", ""))}
    source = part.get("source") or {}
    inline = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    url = source.get("url", "") if source.get("type") == "url" else inline
    return {"type": "image_url", "image_url": {"url": url}}


def _refused(error: RefusedRequest, version: str) -> Response:
    """Return a refusal in Anthropic's shape; `version`: vLLM's."""
    body = failed.whole(failed.MESSAGES, version, str(error), error.kind, error.status)
    return response(body, error.status)


async def count(engine: SimEngine, body: CountBody, date: Callable[[], str]) -> Response:
    """Count a message's tokens."""
    try:
        answer.check_model(body.model, engine)
        tokens = len(chat_prompt(engine, body.chat(), date).ids)
    except RefusedRequest as error:
        return _refused(error, engine.facts.version)
    return response(
        {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
    )


async def message(
    engine: SimEngine, body: MessagesBody, request: Request, date: Callable[[], str]
) -> Response:
    """Answer one request. One that cannot become a chat frees no KV of P."""
    version = engine.facts.version
    try:
        asked = body.whole_chat()
    except RefusedRequest as error:
        return _refused(error, version)
    return await as_chat(
        engine,
        asked,
        request,
        date,
        whole=_whole,
        refused=lambda error: failed.whole(
            failed.MESSAGES, version, error["message"], error["type"], error["code"]
        ),
        events=partial(_events, version=version),
    )


def _whole(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's whole answer as a message: fields that are None are left out."""
    (choice,) = chat["choices"]
    content: list[dict[str, Any]] = []
    if thoughts := choice["message"]["reasoning"]:
        content.append({"type": "thinking", "thinking": thoughts, "signature": uuid.uuid4().hex})
    if (text := choice["message"]["content"]) or not content:
        content.append({"type": "text", "text": text or ""})
    reason, sequence = _stop(choice["finish_reason"], choice["stop_reason"])
    made = {**_head(chat), "content": content, "model": chat["model"]}
    made |= {"stop_reason": reason, "stop_sequence": sequence, "usage": _usage(chat["usage"])}
    made |= {name: chat[name] for name in ("kv_transfer_params", "ec_transfer_params")}
    return {name: value for name, value in made.items() if value is not None}


def _head(chat: dict[str, Any]) -> dict[str, Any]:
    return {"id": chat["id"], "type": "message", "role": "assistant"}


def _stop(finish: str | None, stopped_by: int | str | None) -> tuple[str | None, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if finish == "length":
        return "max_tokens", None
    if finish != "stop":
        return None, None
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """Return a chat's usage as a message's: with details, cached tokens are counted apart."""
    details = usage.get("prompt_tokens_details") or {}
    cached, created = details.get("cached_tokens"), details.get("created_cache_tokens")
    computed = usage["prompt_tokens"] - (cached or 0) - (created or 0)
    found = {
        "input_tokens": max(0, computed),
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }
    return {name: value for name, value in found.items() if value is not None}


# -- streams


class _Blocks:
    """The content blocks of a stream."""

    def __init__(self) -> None:
        self._kind, self._index, self._signature = "", 0, ""

    def add(self, kind: str, text: str) -> Sequence[bytes]:
        """Return the events of a piece of text or of thoughts."""
        events = [] if kind == self._kind else [*self.close(), self._open(kind)]
        delta = {"type": f"{kind}_delta", kind: text}
        return [*events, failed.named("content_block_delta", delta=delta, index=self._index)]

    def _open(self, kind: str) -> bytes:
        self._kind, self._signature = kind, uuid.uuid4().hex
        block = {"type": kind, kind: ""}
        return failed.named("content_block_start", content_block=block, index=self._index)

    def close(self) -> Sequence[bytes]:
        """Return the events that end the block that is open."""
        if not self._kind:
            return []
        events = [failed.named("content_block_stop", index=self._index)]
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            events.insert(0, failed.named("content_block_delta", delta=delta, index=self._index))
        self._kind, self._index = "", self._index + 1
        return events


async def _events(chunks: AsyncIterable[bytes], version: str) -> AsyncGenerator[bytes, None]:
    """Yield the events of a message for those of a chat."""
    blocks, started = _Blocks(), False
    finish: str | None = None
    stopped_by: int | str | None = None
    async for data in chunks:
        if data == b"[DONE]":
            yield failed.named("message_stop")
            continue
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            for event in failed.in_message(version, chunk["error"], blocks.close()):
                yield event
            return
        if not started:
            started = True
            begun = {**_head(chunk), "content": [], "model": chunk["model"]}
            begun |= {"stop_reason": None, "stop_sequence": None, "usage": _usage(chunk["usage"])}
            yield failed.named("message_start", message=begun)
            continue
        if not chunk["choices"]:
            for event in blocks.close():
                yield event
            reason, sequence = _stop(finish or "stop", stopped_by)
            ending = {"stop_reason": reason, "stop_sequence": sequence}
            yield failed.named("message_delta", delta=ending, usage=_usage(chunk["usage"]))
            continue
        (choice,) = chunk["choices"]
        if choice["finish_reason"] is not None:
            finish, stopped_by = choice["finish_reason"], choice.get("stop_reason")
        for kind, key in (("thinking", "reasoning"), ("text", "content")):
            if text := choice["delta"].get(key):
                for event in blocks.add(kind, text):
                    yield event
