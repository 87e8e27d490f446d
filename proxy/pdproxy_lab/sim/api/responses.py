"""`/v1/responses`: OpenAI's Responses API as vLLM has it without a store, for messages of text.

Owns the order of a stream's events. Generation itself is the chat route's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, model_validator

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.chat import chat_prompt
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.generation import SimPrompt, deltas
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.api.salts import check_salt
from pdproxy_lab.sim.api.sampling import admit, check_lengths, sampling_params
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import SamplingParams

_NO_BACKGROUND = (
    "This vLLM engine does not support `store=True` and therefore does not support the "
    "background mode. To enable these"
    " features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
    "the vLLM server."
)


class ResponsesBody(BaseModel):
    """The body of `/v1/responses`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    store: bool | None = True
    background: bool | None = False
    previous_response_id: str | None = None
    previous_input_messages: list[Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_background(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_salt(data)
        if isinstance(data, dict) and data.get("background") and not data.get("store", True):
            raise RefusedRequest("background can only be used when `store` is true", "background")
        return data


async def respond(
    engine: SimEngine, body: ResponsesBody, _: Request, date: Callable[[], str]
) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    answer.check_model(body.model, engine)
    if body.store and body.background:
        raise RefusedRequest(_NO_BACKGROUND, "background", kind="invalid_request_error")
    if body.previous_input_messages and body.previous_response_id:
        message = "Only one of `previous_input_messages` and `previous_response_id` can be set."
        raise RefusedRequest(message, "previous_response_id", kind="invalid_request_error")
    if body.previous_response_id is not None:
        message = f"Response with id '{body.previous_response_id}' not found."
        raise RefusedRequest(message, "response_id", kind="invalid_request_error", status=404)
    chat = _as_chat(body)
    check_lengths(chat, engine.facts)
    prompt = chat_prompt(engine, chat, date)
    params = sampling_params(chat, prompt.ids, engine.facts, engine.tokenizer)
    admit(params, chat, prompt.ids, engine.facts, engine.tokenizer)
    job = _Job(engine, body, chat, prompt, params)
    if body.stream:
        return StreamingResponse(job.events(), media_type="text/event-stream")
    return await job.whole()


def _as_chat(body: ResponsesBody) -> ChatBody:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [
            {"role": item.get("role", "user"), "content": _text(item.get("content"))}
            for item in body.input
        ]
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_completion_tokens": body.max_output_tokens,
    }
    given |= {"kv_transfer_params": body.kv_transfer_params, "cache_salt": body.cache_salt}
    set_ones = {name: value for name, value in given.items() if value is not None}
    return ChatBody.model_validate({"model": body.model, "messages": messages, **set_ones})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


class _Job:
    """The answer to one request while it is generated."""

    def __init__(
        self,
        engine: SimEngine,
        body: ResponsesBody,
        chat: ChatBody,
        prompt: SimPrompt,
        params: SamplingParams,
    ) -> None:
        self._engine, self._body, self._chat, self._prompt, self._params = (
            engine,
            body,
            chat,
            prompt,
            params,
        )
        self._id = f"resp_{secrets.token_hex(8)}"
        self._message = f"msg_{secrets.token_hex(8)}"
        self._created = int(time.time())
        self._number = 0
        self._made = 0

    def _response(self, status: str, text: str | None) -> dict[str, Any]:
        output = [] if text is None else [self._item(self._item_status(status), text)]
        used, made = len(self._prompt.ids), self._made
        details = {
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        counted = {
            "input_tokens": used,
            "output_tokens": made,
            "total_tokens": used + made,
            **details,
        }
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": self._body.instructions,
            "metadata": self._body.metadata,
            "model": self._engine.facts.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": self._params.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if self._body.top_p is None else self._body.top_p,
            "background": False,
            "max_output_tokens": self._params.max_tokens,
            "previous_response_id": None,
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": None if text is None else counted,
            "user": self._body.user,
        }

    def _item_status(self, status: str) -> str:
        """Return the status of the output item of a response that has ended with this one."""
        return status if since.v033(self._engine.facts.version) else "completed"

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self._part(text)]
        return {
            "id": self._message,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    async def _texts(self) -> AsyncGenerator[tuple[str, str | None], None]:
        found = deltas(
            self._engine, self._id, [self._prompt], [self._params], self._chat, numbered=False
        )
        async with aclosing(found) as all_of_them:
            async for delta in all_of_them:
                self._made += len(delta.tokens)
                yield delta.text, delta.finish_reason

    async def whole(self) -> Response:
        """Return the whole answer."""
        text, finish = "", None
        async with aclosing(self._texts()) as texts:
            async for piece, reason in texts:
                text, finish = text + piece, reason
        return response(self._response("incomplete" if finish == "length" else "completed", text))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield a stream's events. vLLM up to 0.32.0 ends every stream of text with
        `response.completed`.
        """
        started = self._response("in_progress", None)
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        place = {"item_id": self._message, "output_index": 0, "content_index": 0}
        text, finish = "", None
        async with aclosing(self._texts()) as texts:
            async for piece, reason in texts:
                if self._number == 2:
                    item = self._item("in_progress", None)
                    yield self._event("response.output_item.added", output_index=0, item=item)
                    yield self._event("response.content_part.added", **place, part=self._part(""))
                text, finish = text + piece, reason
                yield self._event("response.output_text.delta", **place, delta=piece, logprobs=[])
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=self._part(text))
        status = "incomplete" if finish == "length" else "completed"
        ended = self._item_status(status)
        yield self._event("response.output_item.done", output_index=0, item=self._item(ended, text))
        yield self._event(f"response.{ended}", response=self._response(status, text))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({**fields, "sequence_number": self._number, "type": kind})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
