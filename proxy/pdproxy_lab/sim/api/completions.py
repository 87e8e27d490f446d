"""`/v1/completions`: prompts in, text out. Bodies and events have vLLM's bytes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.errors import EngineRefused, RefusedRequest, response
from pdproxy_lab.sim.api.generation import Delta, LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.logprobs import Entry, completion_logprobs, entry_of, prompt_logprobs
from pdproxy_lab.sim.api.protocol import CompletionBody
from pdproxy_lab.sim.api.sampling import admit, check_lengths, check_prompt, sampling_params
from pdproxy_lab.sim.api.tools import grammar_of_begun_call
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import SamplingParams


async def complete(engine: SimEngine, body: CompletionBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    answer.check_model(body.model, engine)
    check_lengths(body, engine.facts)
    prompts = _prompts(body, engine)
    rank = answer.rank_of(request)
    job = _Job(engine, body, prompts, answer.request_id("cmpl", request, body), rank)
    params = [
        sampling_params(body, prompt.ids, engine.facts, engine.tokenizer) for prompt in prompts
    ]
    try:
        for one, prompt in zip(params, prompts, strict=True):
            admit(one, body, prompt.ids, engine.facts, engine.tokenizer, rank=rank)
            one.grammar = one.grammar or grammar_of_begun_call(prompt.ids, engine.tokenizer)
    except EngineRefused as error:
        if body.stream:
            return answer.streamed_refusal(error, engine.facts.version)
        raise
    if body.stream:
        return answer.streamed(job.events(params), engine.facts.version)
    return await job.whole(params)


def _prompts(body: CompletionBody, engine: SimEngine) -> list[SimPrompt]:
    """Return the prompts, tokenized. Ids in `kv_transfer_params` are not read here, only for
    chats.
    """
    given: Any = body.prompt
    if given is None:
        raise RefusedRequest(
            "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    several = (
        given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    )
    if given == []:
        raise RefusedRequest(
            "You must pass at least one prompt",
            "prompt" if since.v033(engine.facts.version) else None,
        )
    found = []
    for one in several:
        if isinstance(one, str):
            ids, tokenized = (
                engine.tokenizer.encode(one, add_special_tokens=body.add_special_tokens),
                True,
            )
        else:
            ids, tokenized = list(one), False
        ids = check_prompt(ids, body, engine.facts, tokenized=tokenized)
        found.append(SimPrompt(ids, one if isinstance(one, str) else engine.tokenizer.decode(ids)))
    return found


class _Job:
    """The answer to one request while it is generated."""

    def __init__(
        self,
        engine: SimEngine,
        body: CompletionBody,
        prompts: list[SimPrompt],
        request_id: str,
        rank: int | None,
    ) -> None:
        self._rank = rank
        self._engine, self._body, self._prompts, self._id = engine, body, prompts, request_id
        self._created = int(time.time())
        self._usage_at_end, self._running_usage = body.usage_in_stream(
            forced=engine.facts.enable_force_include_usage
        )
        self._count = len(prompts) * body.children
        self._offsets = [0] * self._count
        self._logprobs = body.logprobs is not None

    def _run(self, params: list[SamplingParams]) -> AsyncGenerator[Delta, None]:
        return deltas(
            self._engine,
            self._id,
            self._prompts,
            params,
            self._body,
            numbered=True,
            rank=self._rank,
        )

    def _head(self) -> dict[str, Any]:
        model = answer.shown_model(self._body.model, self._engine)
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": model,
        }

    def _told(self, delta: Delta, first: bool) -> tuple[str, list[int], list[Entry]]:
        """Return text, ids and probabilities of a delta, with the prompt's before them for
        `echo`.
        """
        prompt = self._prompts[delta.prompt]
        entries: list[Entry] = [entry_of(token) for token in delta.tokens]
        if not (first and self._body.echo):
            return delta.text, delta.ids, entries
        text = "" if self._body.return_token_ids else prompt.text
        before: list[Entry] = list(delta.prompt_logprobs or ())
        if self._body.max_tokens == 0:
            return text, prompt.ids, before
        return text + delta.text, prompt.ids + delta.ids, before + entries

    def _choice_logprobs(
        self, index: int, ids: list[int], entries: list[Entry]
    ) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        logprobs, self._offsets[index] = completion_logprobs(
            self._engine.tokenizer,
            ids,
            entries,
            self._body.logprobs or 0,
            self._offsets[index],
            bool(self._body.return_tokens_as_token_ids),
        )
        return logprobs

    async def whole(self, params: list[SamplingParams]) -> Response:
        """Return the whole answer."""
        body, facts = self._body, self._engine.facts
        parts: list[list[Delta]] = [[] for _ in range(self._count)]
        handle, cached = None, 0
        async with aclosing(self._run(params)) as found:
            async for delta in found:
                if delta.finish_reason == "error":
                    raise LoadFailedError
                parts[delta.index].append(delta)
                if delta.kv_transfer_params is not None and delta.prompt == 0:
                    handle = delta.kv_transfer_params
        choices: list[dict[str, Any]] = []
        generated = 0
        for index, made in enumerate(parts):
            first, last = made[0], made[-1]
            merged = Delta(
                index,
                first.prompt,
                "".join(delta.text for delta in made),
                tuple(token for delta in made for token in delta.tokens),
                last.finish_reason,
                last.stop_reason,
                first.cached,
                first.created,
                None,
                first.prompt_logprobs,
            )
            generated += len(merged.tokens)
            cached = first.cached
            text, ids, entries = self._told(merged, True)
            choices.append(
                {
                    "index": index,
                    "text": text,
                    "logprobs": self._choice_logprobs(index, ids, entries),
                    "finish_reason": last.finish_reason,
                    "stop_reason": last.stop_reason,
                    "token_ids": merged.ids if body.return_token_ids else None,
                    "prompt_logprobs": prompt_logprobs(
                        self._engine.tokenizer, first.prompt_logprobs
                    ),
                    "prompt_token_ids": self._prompts[first.prompt].ids
                    if body.return_token_ids
                    else None,
                    "routed_experts": None,
                    **since.weight_versions(facts.version),
                }
            )
        counted = answer.usage(sum(len(prompt.ids) for prompt in self._prompts), generated)
        return response(
            {
                **self._head(),
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": answer.fingerprint(facts),
                "usage": counted
                | {
                    "prompt_tokens_details": answer.details(facts, cached),
                    "completion_tokens_details": None,
                },
                "kv_transfer_params": handle,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    async def events(self, params: list[SamplingParams]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream except `[DONE]`."""
        body, facts = self._body, self._engine.facts
        head, started = self._head(), [False] * self._count
        counts = [0] * self._count
        cached: int | None = None
        seen = [0] * len(self._prompts)
        async with aclosing(self._run(params)) as found:
            async for delta in found:
                if delta.finish_reason == "error":
                    raise LoadFailedError
                index = delta.index
                cached = delta.cached if cached is None else cached
                seen[delta.prompt] = len(self._prompts[delta.prompt].ids)
                first, started[index] = not started[index], True
                text, ids, entries = self._told(delta, first)
                counts[index] += len(delta.tokens)
                if not text and not ids and not counts[index]:
                    continue  # an engine that only encodes has ended it
                shown = (
                    self._prompts[delta.prompt].ids
                    if first and (body.return_token_ids or body.echo)
                    else None
                )
                choice = {
                    "index": index,
                    "text": text,
                    "logprobs": self._choice_logprobs(index, ids, entries),
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                    "prompt_token_ids": shown,
                    "token_ids": delta.ids if body.return_token_ids else None,
                    **since.weight_versions(facts.version),
                }
                chunk = head | {"choices": [choice]}
                if self._running_usage:
                    chunk["usage"] = answer.usage(seen[delta.prompt], counts[index])
                if delta.finish_reason is not None and not self._usage_at_end:
                    chunk["system_fingerprint"] = answer.fingerprint(facts)
                if since.v033(facts.version):
                    chunk["kv_transfer_params"] = (
                        None if delta.finish_reason is None else delta.kv_transfer_params
                    )
                yield answer.event(chunk)
        if self._usage_at_end:
            counted = answer.usage(sum(seen), sum(counts))
            details = answer.details(facts, cached or 0)
            if details is not None:
                counted["prompt_tokens_details"] = {
                    key: value for key, value in details.items() if value is not None
                }
            yield answer.event(
                head
                | {"choices": [], "usage": counted, "system_fingerprint": answer.fingerprint(facts)}
            )
