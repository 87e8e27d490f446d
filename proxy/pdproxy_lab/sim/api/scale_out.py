"""`--enable-scale-out`: chats to token ids and sampling parameters (render), and token ids to chats
(derender).

Owns the routes `/v1/chat/completions/render` and, for streams, `/v1/chat/completions/derender`,
with vLLM's bounds and faults: each finish reason becomes `tool_calls` behind a call, a stop token
is text, and no token counts as reasoning. `token_ids` has `/inference/v1/generate`. The other
routes of scale-out answer as without the flag.
Source: vLLM 0.32.0 `entrypoints/scale_out`, `renderers/online_derenderer.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.chat import chat_prompt
from pdproxy_lab.sim.api.detokenizer import Detokenizer
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.parsing import ChoiceParser, looks_for_calls
from pdproxy_lab.sim.api.protocol import ChatBody, NamedTool, TokenId
from pdproxy_lab.sim.api.sampling import check_lengths, sampling_params
from pdproxy_lab.sim.api.tools import CallParser
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import SamplingParams

_MAX_WINDOW = 1024


class _Model(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class GeneratedChoice(_Model):
    """A choice of an event of `/inference/v1/generate`."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class GeneratedUsage(_Model):
    """Its usage."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0


class GeneratedChunk(_Model):
    """An event of `/inference/v1/generate`."""

    request_id: str = Field(default_factory=lambda: secrets.token_hex(16))
    usage: GeneratedUsage | None = None
    prompt_token_ids: list[TokenId] | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GeneratedChoice]


class StreamState(_Model):
    """What the client carries from one call to the next. The first five fields are used without
    parsers.
    """

    prev_tokens: list[str] = []
    prefix_offset: int = Field(default=0, ge=0)
    read_offset: int = Field(default=0, ge=0)
    logprob_context_token_ids: list[int] = Field(default=[], max_length=4)
    logprob_text_offset: int = Field(default=0, ge=0)
    role_sent: bool = False
    output_token_ids: list[int] = []
    output_chunk_lens: list[Annotated[int, Field(gt=0)]] = []
    tools_streamed: bool = False
    last_tool_call_ids: list[str] = []

    @field_validator("prev_tokens")
    @classmethod
    def _bounded(cls, found: list[str]) -> list[str]:
        if len(found) > _MAX_WINDOW:
            raise ValueError(f"prev_tokens length ({len(found)}) exceeds maximum ({_MAX_WINDOW})")
        return found

    @model_validator(mode="after")
    def _fits(self) -> StreamState:
        total, count = sum(self.output_chunk_lens), len(self.output_token_ids)
        if total != count:
            raise ValueError(
                f"output_chunk_lens must sum to len(output_token_ids) (got sum={total}, "
                f"len(output_token_ids)={count})"
            )
        return self


class DerenderBody(_Model):
    """The body of `/v1/chat/completions/derender` for one event of a stream."""

    stream: Literal[True]
    model: str | None = None
    generate_chunk: GeneratedChunk
    stream_state: StreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: list[TokenId] | None = None
    chat_request: ChatBody | None = None


def rendered(
    engine: SimEngine, body: ChatBody, request: Request, date: Callable[[], str]
) -> Response:
    """Answer `/v1/chat/completions/render`: the body of `/inference/v1/generate` for a chat.

    Raises:
        Refused: for the caller to answer.
    """
    answer.check_name(body.model, engine)
    check_lengths(body, engine.facts)
    if body.use_beam_search:
        raise RefusedRequest("Beam search is not supported by the render endpoint")
    prompt = chat_prompt(engine, body, date)
    params = sampling_params(body, prompt.ids, engine.facts, engine.tokenizer)
    thinks = engine.facts.reasoning_parser != "none"
    return response(
        {
            "request_id": answer.request_id("chatcmpl", request, body),
            "token_ids": prompt.ids,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": _shown(params, body),
            "model": body.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": {"chat_template_kwargs": body.chat_template_kwargs or {}}
            if thinks
            else None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": bool(body.stream),
            "stream_options": body.stream_options.model_dump()
            if body.stream and body.stream_options
            else None,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
    )


def _shown(params: SamplingParams, body: ChatBody) -> dict[str, Any]:
    """Return sampling parameters as vLLM shows them: without most of those that have its
    defaults.
    """
    forced = body.structured_outputs.model_dump(by_alias=True) if body.structured_outputs else None
    if body.tools and body.tool_choice not in (None, "none", "auto"):
        forced = {"structural_tag": "tool calls"}
    shown: dict[str, tuple[Any, Any]] = {
        "temperature": (params.temperature, 1.0),
        "top_p": (1.0 if body.top_p is None else body.top_p, 1.0),
        "top_k": (body.top_k or 0, 0),
        "min_p": (body.min_p or 0.0, 0.0),
        "seed": (params.seed, None),
        "ignore_eos": (params.ignore_eos, False),
        "max_tokens": (params.max_tokens, 16),
        "min_tokens": (params.min_tokens, 0),
        "skip_special_tokens": (body.skip_special_tokens and not looks_for_calls(body), True),
        "structured_outputs": (forced, None),
    }
    always: dict[str, Any] = {
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop": body.stops,
        "stop_token_ids": sorted(params.stop_token_ids),
        "bad_words": body.bad_words,
        "output_kind": 1 if body.stream else 2,
        "skip_clone": True,
        "skip_reading_prefix_cache": False,
    }
    return {name: value for name, (value, default) in shown.items() if value != default} | always


def derendered(engine: SimEngine, body: DerenderBody) -> Response:
    """Answer `/v1/chat/completions/derender`: what the chat's stream shows of one event of token
    ids, and the state behind it.

    Raises:
        Refused: for the caller to answer.
    """
    answer.check_name(body.model, engine)
    facts, chunk, chat = engine.facts, body.generate_chunk, body.chat_request
    parses = facts.enable_auto_tool_choice or facts.reasoning_parser != "none"
    if parses and chat is None:
        raise RefusedRequest(
            "chat_request is required when a tool or reasoning parser is configured because "
            "plain detokenization would leak"
            " raw parser markup into content."
        )
    if parses and body.prompt_token_ids is None:
        raise RefusedRequest(
            "prompt_token_ids is required when a tool or reasoning parser is configured. Without "
            "it parse_delta cannot tell"
            " whether the prompt left reasoning open (e.g. a chat template that pre-opens "
            "<think>) and would misclassify"
            " reasoning content as plain content."
        )
    if len(chunk.choices) > 1:
        raise RefusedRequest(
            f"derender_chat_stream expects at most one choice per chunk (got {len(chunk.choices)})."
        )
    state = body.stream_state or StreamState()
    prompt, prior = body.prompt_token_ids or [], len(state.output_token_ids)
    delta = sum(len(choice.token_ids or ()) for choice in chunk.choices)
    if len(prompt) + prior + delta > facts.max_model_len:
        raise RefusedRequest(
            f"prompt_token_ids length ({len(prompt)}) plus output_token_ids length ({prior}) "
            f"plus delta ({delta})"
            f" exceeds max_model_len ({facts.max_model_len})."
        )
    try:
        choices = [
            _choice(engine, chat or ChatBody(messages=[]), prompt, state, one)
            for one in chunk.choices
        ]
    except IndexError:
        raise RefusedRequest("invalid stream_state: derender failed") from None
    counted = chunk.usage
    usage = None
    if counted is not None:
        before = counted.prompt_tokens if body.prompt_tokens is None else body.prompt_tokens
        usage = answer.usage(before, counted.completion_tokens or 0)
        usage |= {"prompt_tokens_details": None, "completion_tokens_details": None}
    shown = {
        "id": chunk.request_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.model or facts.model,
        "choices": choices,
        "usage": usage,
        "system_fingerprint": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "metrics": None,
    }
    return response({"chunk": shown, "stream_state": state.model_dump()})


def _choice(
    engine: SimEngine,
    chat: ChatBody,
    prompt: Sequence[int],
    state: StreamState,
    choice: GeneratedChoice,
) -> dict[str, Any]:
    """Return a choice, parsed behind all tokens of `state`, which are parsed again; update the
    state.
    """
    facts = engine.facts
    hides = not chat.include_reasoning and (
        facts.reasoning_parser != "none" or facts.enable_auto_tool_choice
    )
    calls = CallParser(f"chatcmpl-tool-{secrets.token_hex(8)}") if looks_for_calls(chat) else None
    parser = ChoiceParser(facts, prompt, calls, hides=hides)
    detokenizer = Detokenizer(engine.tokenizer, skip_special_tokens=False)
    start = 0
    for length in state.output_chunk_lens:
        ids = state.output_token_ids[start : start + length]
        start += length
        _add(parser, detokenizer, ids)
    ids = choice.token_ids or []
    finish = choice.finish_reason
    found = (_add(parser, detokenizer, ids) if ids or finish is not None else None) or {}
    if ids:
        state.output_token_ids += ids
        state.output_chunk_lens.append(len(ids))
    for call in found.get("tool_calls", ()):
        state.tools_streamed = True
        if "id" not in call:
            continue
        if call["index"] < len(state.last_tool_call_ids):
            call["id"] = state.last_tool_call_ids[call["index"]]
        else:
            state.last_tool_call_ids.append(call["id"])
    delta = {
        "role": None if state.role_sent else "assistant",
        "content": None,
        "reasoning": None,
    } | found
    state.role_sent = True
    if "tool_calls" in delta:
        delta["tool_calls"] = [_spelled_out(call) for call in delta["tool_calls"]]
    if finish is not None and state.tools_streamed and not isinstance(chat.tool_choice, NamedTool):
        finish = "tool_calls"
    return {
        "index": choice.index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if chat.return_token_ids and chat.include_reasoning else None,
    }


def _add(
    parser: ChoiceParser, detokenizer: Detokenizer, ids: Sequence[int]
) -> dict[str, Any] | None:
    detokenizer.add(ids, stopped=False)
    return parser.add(detokenizer.take(finished=False), ids)


def _spelled_out(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with all its fields."""
    function = {"name": None, "arguments": None} | call["function"]
    return {"id": None, "type": None} | call | {"function": function}
