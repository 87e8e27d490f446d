"""`/v1/responses`: OpenAI's Responses API as vLLM has it without a store, for messages of text.

Owns the order of a stream's events, and how a stream fails. Prompts are made and KV is moved as for
chats.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api import answer, reasoning
from pdproxy_lab.sim.api.chat import chat_prompt
from pdproxy_lab.sim.api.errors import EngineRefused, RefusedRequest, response
from pdproxy_lab.sim.api.generation import Delta, LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.protocol import INT64, ChatBody
from pdproxy_lab.sim.api.salts import check_salt
from pdproxy_lab.sim.api.sampling import admit, check_lengths, sampling_params
from pdproxy_lab.sim.api.template import has_media
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.failed import StreamCutError
from pdproxy_lab.sim.request import EngineDeadError, SamplingParams

_NO_BACKGROUND = (
    "This vLLM engine does not support `store=True` and therefore does not support the "
    "background mode. To enable these"
    " features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
    "the vLLM server."
)
_INVALID = "invalid_request_error"
_AS_CHAT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "priority",
    "chat_template_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
)
"""The fields that mean the same for a chat."""
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class ResponsesBody(BaseModel):
    """The body of `/v1/responses`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(**INT64)] | None = None
    stop: str | list[str] | None = []
    stop_token_ids: list[int] | None = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: Annotated[int, Field(**INT64)] = 0
    request_id: str = Field(default_factory=lambda: f"resp_{secrets.token_hex(8)}")
    enable_response_messages: bool = False
    truncation: Literal["auto", "disabled"] | None = "disabled"
    stream: bool | None = False
    store: bool | None = True
    background: bool | None = False
    previous_response_id: str | None = None
    previous_input_messages: list[Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_salt(data)
        if data.get("background") and not data.get("store", True):
            raise RefusedRequest("background can only be used when `store` is true", "background")
        if data.get("prompt") is not None:
            raise RefusedRequest("prompt template is not supported", "prompt")
        if data.get("tool_choice") == "required" and not data.get("tools"):
            raise RefusedRequest(
                "Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice"
            )
        return data

    def chat(self, longest: int, version: str) -> ChatBody:
        """The same request as a chat; `longest`: the engine's context.

        Raises:
            Refused: a value is none that a chat may have.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [
                {"role": item.get("role", "user"), "content": _content(item)} for item in self.input
            ]
        given = {name: getattr(self, name) for name in _AS_CHAT}
        given["max_completion_tokens"] = self.max_output_tokens
        if self.truncation != "disabled":
            # 0.32.0 leaves no place for an answer if the request has no limit
            unlimited = not self.max_output_tokens and not since.v033(version)
            given["truncate_prompt_tokens"] = longest if unlimited else -1
        set_ones = {name: value for name, value in given.items() if value is not None}
        return ChatBody.model_validate({"model": self.model, "messages": messages, **set_ones})


def _content(item: dict[str, Any]) -> str | list[Any]:
    """Return an item's content for a chat: its text, or its parts where some are media."""
    content = item.get("content")
    if not isinstance(content, list):
        return str(content or "")
    if item.get("type") != "reasoning" and has_media(content):
        return content
    return "".join(str(part.get("text", "")) for part in content)


async def respond(
    engine: SimEngine, body: ResponsesBody, request: Request, date: Callable[[], str]
) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    facts = engine.facts
    answer.check_model(body.model, engine)
    if body.store and body.background:
        raise RefusedRequest(_NO_BACKGROUND, "background", kind=_INVALID)
    if body.previous_input_messages and body.previous_response_id:
        message = "Only one of `previous_input_messages` and `previous_response_id` can be set."
        raise RefusedRequest(message, "previous_response_id", kind=_INVALID)
    if body.previous_response_id is not None:
        message = f"Response with id '{body.previous_response_id}' not found."
        raise RefusedRequest(message, "response_id", kind=_INVALID, status=404)
    chat = body.chat(facts.max_model_len, facts.version)
    check_lengths(chat, facts, "max_output_tokens")
    prompt = chat_prompt(engine, chat, date)
    if len(prompt.ids) >= facts.max_model_len:
        message = (
            f"The engine prompt length {len(prompt.ids)} exceeds the max_model_len "
            f"{facts.max_model_len}. Please reduce prompt."
        )
        raise RefusedRequest(message, "input", kind=_INVALID)
    params = sampling_params(chat, prompt.ids, facts, engine.tokenizer)
    # 0.32.0 does not read the header here
    rank = answer.rank_of(request) if since.v033(facts.version) else None
    job = _Job(engine, body, chat, prompt, params, rank)
    if body.stream:
        return StreamingResponse(job.stream(), media_type="text/event-stream")
    return await job.whole()


class _Job:
    """The answer to one request while it is generated."""

    def __init__(
        self,
        engine: SimEngine,
        body: ResponsesBody,
        chat: ChatBody,
        prompt: SimPrompt,
        params: SamplingParams,
        rank: int | None,
    ) -> None:
        self._engine, self._body, self._chat = engine, body, chat
        self._prompt, self._params, self._rank = prompt, params, rank
        self._message = f"msg_{secrets.token_hex(8)}"
        self._created = int(time.time())
        self._number = 0
        self._text, self._ids = "", list[int]()
        self._last: Delta | None = None
        self._handle: dict[str, Any] | None = None
        self._encoded: dict[str, Any] | None = None

    # -- what stands in it

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response with all its fields, in vLLM's order."""
        body, params = self._body, self._params
        over = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        shows = over and body.enable_response_messages
        tools = bool((body.model_extra or {}).get("tools"))
        return {
            "id": body.request_id,
            "created_at": self._created,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": answer.shown_model(body.model, self._engine),
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": params.temperature,
            "tool_choice": "auto" if tools else "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": False,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": body.truncation,
            "usage": self._usage() if over else None,
            "user": body.user,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "kv_transfer_params": self._handle if over else None,
            "ec_transfer_params": self._encoded if over else None,
            "input_messages": [_raw(self._prompt.text, self._prompt.ids)] if shows else None,
            "output_messages": [_raw(self._text, self._ids)] if shows and self._ids else None,
        }

    def _usage(self) -> dict[str, Any]:
        used, made, last = len(self._prompt.ids), len(self._ids), self._last
        cached, created = (last.cached, last.created) if last is not None else (0, 0)
        return {
            "input_tokens": used,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": created,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": made,
            "output_tokens_details": {
                "reasoning_tokens": reasoning.count(self._ids),
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": used + made,
        }

    @property
    def _status(self) -> str:
        """The status of the response at its end."""
        cut = self._last is not None and self._last.finish_reason == "length"
        return "incomplete" if cut else "completed"

    @property
    def _ended(self) -> str:
        """The status of the item at its end, and the kind of a stream's last event: up to 0.32.0
        always `completed`.
        """
        return self._status if since.v033(self._engine.facts.version) else "completed"

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _part(self, text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    # -- how it is made

    async def _texts(self) -> AsyncGenerator[str, None]:
        """Yield the text of each step; note everything else.

        Raises:
            EngineRefused, EngineDeadError, LoadFailedError: vLLM's engine would have.
        """
        engine, rank = self._engine, self._rank
        ids, chat = self._prompt.ids, self._chat
        admit(self._params, chat, ids, engine.facts, engine.tokenizer, rank=rank)
        found = deltas(
            engine,
            f"{self._body.request_id}_0",
            [self._prompt],
            [self._params],
            chat,
            numbered=False,
            rank=rank,
        )
        async with aclosing(found) as all_of_them:
            async for delta in all_of_them:
                if delta.finish_reason == "error":
                    raise LoadFailedError
                self._last, self._text = delta, self._text + delta.text
                self._ids += delta.ids
                self._handle = delta.kv_transfer_params or self._handle
                self._encoded = delta.ec_transfer_params or self._encoded
                yield delta.text

    async def whole(self) -> Response:
        """Return the whole answer."""
        async with aclosing(self._texts()) as texts:
            async for _ in texts:
                pass
        content = [self._part(self._text)] if self._text else []
        return response(self._response(self._status, [self._item(self._ended, content)]))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield a stream's events.

        Raises:
            StreamCutError: it has failed. The first two events come before the engine is asked.
        """
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event
        except (EngineRefused, EngineDeadError, LoadFailedError) as error:
            raise StreamCutError from error

    async def _events(self) -> AsyncGenerator[bytes, None]:
        started = self._response("in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        place = {"item_id": self._message, "output_index": 0, "content_index": 0}
        async with aclosing(self._texts()) as texts:
            async for piece in texts:
                if not piece:
                    continue
                if self._number == 2:
                    item = self._item("in_progress", [])
                    yield self._event("response.output_item.added", output_index=0, item=item)
                    part = self._part("", [])
                    yield self._event("response.content_part.added", **place, part=part)
                yield self._event("response.output_text.delta", **place, delta=piece, logprobs=[])
        output, ended = [], self._ended
        if self._text:
            part = self._part(self._text)
            output.append(self._item(ended, [part]))
            yield self._event("response.output_text.done", **place, text=self._text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=0, item=output[0])
        yield self._event(f"response.{ended}", response=self._response(self._status, output))

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event; its fields are in the order of their names."""
        data = {**fields, "sequence_number": self._number, "type": kind}
        self._number += 1
        encoded = msgspec.json.encode({name: data[name] for name in sorted(data)})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded)


def _raw(text: str, ids: list[int]) -> dict[str, Any]:
    return {"message": text, "tokens": ids, "type": "raw_message_tokens"}
