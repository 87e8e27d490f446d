"""Runs a request: its prompts and choices become requests to the engine, their outputs become
deltas of text.

Owns these child requests: their ids, seeds and detokenizers. One delta is what one engine step made
for one choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from pdproxy_lab.sim.api.detokenizer import Detokenizer
from pdproxy_lab.sim.api.protocol import GenerationBody
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import (
    Candidate,
    EngineOutput,
    EngineRequest,
    Medium,
    SamplingParams,
    Token,
)


class LoadFailedError(Exception):
    """The engine could not get a request's KV."""


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """One prompt: its ids with placeholders for its pictures, its text for `echo`, and these."""

    ids: list[int]
    text: str
    media: tuple[Medium, ...] = ()


@dataclass(slots=True)
class Delta:
    """What one step made for one choice."""

    index: int
    """The index of the choice: by prompt, then by choice."""
    prompt: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    cached: int
    created: int
    kv_transfer_params: dict[str, Any] | None
    prompt_logprobs: tuple[tuple[Candidate, ...] | None, ...] | None
    ec_transfer_params: dict[str, Any] | None = None

    @property
    def ids(self) -> list[int]:
        """The ids of its tokens."""
        return [token.id for token in self.tokens]


class _Child:
    def __init__(
        self, index: int, prompt: int, request: EngineRequest, detokenizer: Detokenizer
    ) -> None:
        self.index, self.prompt, self.request = index, prompt, request
        self._detokenizer = detokenizer

    def take(self, output: EngineOutput) -> Delta:
        finish, stop_reason = output.finish_reason, output.stop_reason
        found = self._detokenizer.add([token.id for token in output.tokens], finish == "stop")
        if found is not None:
            finish, stop_reason = "stop", found  # type: ignore[assignment]
        return Delta(
            self.index,
            self.prompt,
            self._detokenizer.take(finish is not None),
            output.tokens,
            finish,
            stop_reason,
            output.num_cached_tokens,
            output.num_cache_creation_tokens,
            output.kv_transfer_params,
            output.prompt_logprobs,
            output.ec_transfer_params,
        )

    async def deltas(self, engine: SimEngine) -> AsyncGenerator[Delta, None]:
        async with aclosing(engine.generate(self.request)) as outputs:
            async for output in outputs:
                delta = self.take(output)
                yield delta
                if delta.finish_reason is not None:
                    return


async def deltas(
    engine: SimEngine,
    request_id: str,
    prompts: Sequence[SimPrompt],
    params: Sequence[SamplingParams],
    body: GenerationBody,
    *,
    numbered: bool,
    skip_special_tokens: bool = True,
    rank: int | None = None,
) -> AsyncGenerator[Delta, None]:
    """Run all prompts and choices; yield their deltas as they are made; finish_reason "error": the
    KV never came.

    `numbered`: internal ids name the prompt.

    Raises (from the iterator):
        EngineDeadError: the core died.
    """
    children: list[_Child] = []
    for place, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        base = (
            f"{request_id}-{place}-{engine.new_id()}"
            if numbered
            else f"{request_id}-{engine.new_id()}"
        )
        for number in range(body.children):
            seed = sampling.seed + number if sampling.seed is not None else None
            detokenizer = Detokenizer(
                engine.tokenizer,
                body.stops,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                skip_special_tokens=body.skip_special_tokens and skip_special_tokens,
            )
            request = EngineRequest(
                id=base if body.children == 1 else f"{number}_{base}",
                prompt=tuple(prompt.ids),
                media=prompt.media,
                sampling=msgspec.structs.replace(sampling, seed=seed),
                kv_transfer_params=body.kv_transfer_params,
                ec_transfer_params=body.ec_transfer_params,
                cache_salt=body.cache_salt,
                kv_cache_report_mode=str(
                    (body.vllm_xargs or {}).get("kv_cache_report_mode", "incremental")
                ),
                priority=body.priority,
                data_parallel_rank=rank,
            )
            children.append(_Child(len(children), place, request, detokenizer))
    if len(children) == 1:
        async with aclosing(children[0].deltas(engine)) as found:
            async for delta in found:
                yield delta
        return
    async with aclosing(_merged(engine, children)) as found:
        async for delta in found:
            yield delta


async def _merged(engine: SimEngine, children: Sequence[_Child]) -> AsyncGenerator[Delta, None]:
    """Run children concurrently; the first one that fails ends all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def run(child: _Child) -> None:
        try:
            async for delta in child.deltas(engine):
                queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(run(child), name=child.request.id) for child in children]
    left = len(tasks)
    try:
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
