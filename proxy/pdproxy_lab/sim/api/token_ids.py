"""`/inference/v1/generate` of `--enable-scale-out`: token ids in, token ids (or text) out.

Owns the shapes of its answers. A request that is refused here frees no KV of P. Source: vLLM 0.32.0
`entrypoints/scale_out/token_in_token_out`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.errors import EngineRefused, RefusedRequest, response
from pdproxy_lab.sim.api.generation import Delta, LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.logprobs import chat_logprobs, entry_of, prompt_logprobs
from pdproxy_lab.sim.api.protocol import INT64, CompletionBody, StreamOptions
from pdproxy_lab.sim.api.salts import check_salt
from pdproxy_lab.sim.api.sampling import admit, check_prompt, sampling_params
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import Token


class GenerateBody(BaseModel):
    """The body of `/inference/v1/generate`."""

    model_config = ConfigDict(protected_namespaces=())

    request_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: dict[str, Any]
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(**INT64)] = 0
    kv_transfer_params: dict[str, Any] | None = None

    @field_validator("token_ids")
    @classmethod
    def _positive(cls, ids: list[int]) -> list[int]:
        if any(one < 0 for one in ids):
            raise ValueError("token_ids must not contain negative values")
        return ids

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_salt(data)
        return data

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Whether a stream ends with the usage, and whether each of its events has one."""
        options = self.stream_options
        at_the_end = options is not None and bool(options.include_usage)
        return at_the_end, at_the_end and bool(options and options.continuous_usage_stats)

    def completion(self, longest: int) -> CompletionBody:
        """The same request as a completion; `longest`: the engine's context.

        Raises:
            Refused: a value is none that a completion may have.
        """
        params = {name: value for name, value in self.sampling_params.items() if value is not None}
        room = longest - len(self.token_ids)
        own: dict[str, Any] = {"prompt": self.token_ids, "priority": self.priority}
        own |= {"cache_salt": self.cache_salt, "kv_transfer_params": self.kv_transfer_params}
        return CompletionBody.model_validate({"max_tokens": room, **params, **own})


async def generate(engine: SimEngine, body: GenerateBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    answer.check_model(body.model, engine)
    facts = engine.facts
    asked = body.completion(facts.max_model_len)
    if asked.n > facts.max_num_seqs:
        raise RefusedRequest(
            f"sampling_params.n must be at most the server's max_num_seqs ({facts.max_num_seqs}), "
            f"got {asked.n}."
        )
    job = _Job(engine, body, asked, request)
    if body.stream:
        return answer.streamed(job.events(), facts.version)
    return await job.whole()


class _Job:
    """The answer to one request while it is generated."""

    def __init__(
        self, engine: SimEngine, body: GenerateBody, asked: CompletionBody, request: Request
    ) -> None:
        self._engine, self._body, self._asked = engine, body, asked
        self._rank = answer.rank_of(request)
        self._id = f"generate-tokens-{request.headers.get('x-request-id') or body.request_id}"
        self._counts = [0] * asked.n
        self._text = body.output_mode == "text"
        ids = body.token_ids
        # what is too long is refused by the engine
        fits = len(ids) < engine.facts.max_model_len
        self._params = sampling_params(asked, ids, engine.facts, engine.tokenizer) if fits else None

    async def _run(self) -> AsyncGenerator[Delta, None]:
        """Yield what the engine makes.

        Raises:
            EngineRefused, EngineDeadError, LoadFailedError: vLLM's engine would have.
        """
        engine, ids, asked = self._engine, self._body.token_ids, self._asked
        if self._params is None:
            raise EngineRefused(_too_long(len(ids), engine.facts.max_model_len))
        check_prompt(ids, asked, engine.facts, tokenized=False)
        admit(self._params, asked, ids, engine.facts, engine.tokenizer, rank=self._rank)
        found = deltas(
            engine,
            self._id,
            [SimPrompt(ids, "")],
            [self._params],
            asked,
            numbered=False,
            rank=self._rank,
        )
        async with aclosing(found) as all_of_them:
            async for delta in all_of_them:
                if delta.finish_reason == "error":
                    raise LoadFailedError
                self._counts[delta.index] += len(delta.tokens)
                yield delta

    def _usage(self, made: int) -> dict[str, Any]:
        return answer.usage(len(self._body.token_ids), made)

    def _choice(self, parts: list[Delta]) -> dict[str, Any]:
        """Return a choice, or an event's part of it."""
        last = parts[-1]
        tokens = tuple(token for delta in parts for token in delta.tokens)
        over = last.finish_reason is not None
        span = {"version": "default", "start": 0, "end": self._counts[last.index]}
        text = {"text": "".join(delta.text for delta in parts)} if self._text else {}
        return {
            "index": last.index,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "token_ids": [token.id for token in tokens],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [span] if over else None,
            **text,
            "logprobs": self._logprobs(tokens),
        }

    def _logprobs(self, tokens: tuple[Token, ...]) -> dict[str, Any] | None:
        wanted = self._asked.logprobs
        if wanted is None:
            return None
        if self._text:
            return chat_logprobs(self._engine.tokenizer, tokens, wanted, as_ids=False)
        content = []
        for token in tokens:
            entries = [
                {"token_id": one.token, "logprob": one.logprob, "rank": one.rank}
                for one in entry_of(token) or ()
            ]
            kept = entries if wanted == -1 else entries[: max(wanted, 1)]
            content.append({**entries[0], "top_logprobs": kept})
        return {"content": content}

    async def whole(self) -> Response:
        """Return the whole answer."""
        body, facts = self._body, self._engine.facts
        parts: list[list[Delta]] = [[] for _ in range(self._asked.n)]
        handle = None
        async with aclosing(self._run()) as found:
            async for delta in found:
                parts[delta.index].append(delta)
                handle = delta.kv_transfer_params or handle
        first = parts[0][0]
        details = {"prompt_tokens_details": answer.details(facts, first.cached)}
        return response(
            {
                "request_id": self._id,
                "model": answer.shown_model(body.model, self._engine),
                "created": int(time.time()),
                "usage": self._usage(sum(self._counts))
                | details
                | {"completion_tokens_details": None},
                "prompt_logprobs": prompt_logprobs(self._engine.tokenizer, first.prompt_logprobs),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": body.token_ids if body.return_token_ids else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": handle,
                "ec_transfer_params": None,
                "output_mode": body.output_mode,
                "choices": [self._choice(made) for made in parts],
            }
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream except `[DONE]`."""
        body = self._body
        at_the_end, always = body.usage_in_stream
        mode = {"output_mode": body.output_mode}
        cached: int | None = None
        async with aclosing(self._run()) as found:
            async for delta in found:
                first, cached = cached is None, delta.cached if cached is None else cached
                if not (delta.tokens or delta.finish_reason or (self._text and delta.text)):
                    continue
                none = {"prompt_tokens_details": None, "completion_tokens_details": None}
                usage = self._usage(self._counts[delta.index]) | none if always else None
                prompt = first and body.return_token_ids
                ids = {"prompt_token_ids": body.token_ids} if prompt else {}
                head = {"request_id": self._id, "usage": usage}
                yield answer.event(head | ids | mode | {"choices": [self._choice([delta])]})
        if at_the_end:
            usage = self._usage(sum(self._counts))
            if self._engine.facts.enable_prompt_tokens_details:
                usage["prompt_tokens_details"] = {"cached_tokens": cached or 0}
            yield answer.event({"request_id": self._id, "usage": usage} | mode | {"choices": []})


def _too_long(length: int, longest: int) -> str:
    """Return how the engine refuses a prompt that leaves no place for a token."""
    if length > longest:
        return (
            f"The decoder prompt (length {length}) is longer than the maximum model length of "
            f"{longest}. Make sure that `max_model_len` is no smaller than the number of text "
            "tokens."
        )
    return (
        f"The decoder prompt (length {length}) plus the number of requested output tokens (at "
        f"least 1) is longer than the maximum model length of {longest}. Make sure that "
        "`max_model_len` is no smaller than the number of text tokens (prompt + requested output "
        "tokens)."
    )
