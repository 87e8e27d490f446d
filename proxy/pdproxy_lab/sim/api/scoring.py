"""`/generative_scoring`: how likely a token is as the next one after a query and an item. Bodies
have vLLM's bytes.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.salts import check_salt
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.language import mix
from pdproxy_lab.sim.request import EngineRequest, SamplingParams

_MAX_LABELS = 128
_SEEN = 20
"""The likeliest tokens whose probabilities the model itself knows."""


class ScoringBody(BaseModel):
    """The body of the route."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    query: str | list[int]
    items: list[str] | list[list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] = 0
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_salt(data)
        return data


async def score(engine: SimEngine, body: ScoringBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError: for the caller to answer.
    """
    answer.check_model(body.model, engine)
    size = engine.tokenizer.vocab_size
    for label in body.label_token_ids:
        if not 0 <= label < size:
            raise RefusedRequest(
                f"label_token_id {label} is out of vocabulary range [0, {size}). Please provide "
                f"valid token IDs."
            )
    if not body.label_token_ids:
        raise RefusedRequest("label_token_ids must contain at least one token ID.")
    if not body.items:
        raise RefusedRequest("items must contain at least one item.")
    if len(body.label_token_ids) > _MAX_LABELS:
        count = len(body.label_token_ids)
        raise RefusedRequest(
            f"Requested logprob_token_ids of length {count}, which is greater than max allowed: "
            f"{_MAX_LABELS}",
            "logprob_token_ids",
            value=count,
        )
    base = (
        f"generative-scoring-"
        f"{request.headers.get('x-request-id') or body.request_id or engine.new_id()}"
    )
    created = int(time.time())
    prompts = _prompts(engine, body)
    if not all(prompts):
        raise RefusedRequest("The decoder prompt cannot be empty")
    names = (f"{base}-{number}" for number in range(len(prompts)))
    reads = [
        asyncio.ensure_future(_read(engine, body, name, ids))
        for name, ids in zip(names, prompts, strict=False)
    ]
    try:
        found = await asyncio.gather(*reads)
    finally:
        for read in reads:
            read.cancel()
    data = [
        {"index": n, "object": "score", "score": _score(read, body)} for n, read in enumerate(found)
    ]
    return response(
        {
            "id": base,
            "object": "list",
            "created": created,
            "model": engine.facts.model,
            "data": data,
            "usage": answer.usage(sum(map(len, prompts)), len(prompts))
            | {"prompt_tokens_details": None, "completion_tokens_details": None},
        }
    )


def _prompts(engine: SimEngine, body: ScoringBody) -> list[list[int]]:
    def ids(text: str | list[int], *, special: bool) -> list[int]:
        return (
            engine.tokenizer.encode(text, add_special_tokens=special)
            if isinstance(text, str)
            else text
        )

    query = ids(body.query, special=body.add_special_tokens)
    items = [ids(item, special=False) for item in body.items]
    joined = [item + query if body.item_first else query + item for item in items]
    return [one[: engine.facts.max_model_len - 1] for one in joined]


async def _read(engine: SimEngine, body: ScoringBody, name: str, ids: list[int]) -> list[float]:
    """Return the log probabilities of the labels as the next token."""
    sampling = SamplingParams(max_tokens=1, logprobs=_SEEN)
    one = EngineRequest(
        id=f"{name}-{engine.new_id()}",
        prompt=tuple(ids),
        sampling=sampling,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )
    known: dict[int, float] = {}
    async for output in engine.generate(one):
        for token in output.tokens:
            known = {candidate.token: candidate.logprob for candidate in token.top}
    likeliest = next(iter(known), 0)
    return [
        known.get(label, -12.0 - (mix(likeliest, label) % 4096) / 1024)
        for label in body.label_token_ids
    ]


def _score(logprobs: list[float], body: ScoringBody) -> float:
    found = dict(zip(body.label_token_ids, logprobs, strict=True))
    first = found[body.label_token_ids[0]]
    if not body.apply_softmax:
        return math.exp(first)
    highest = max(found.values())
    return math.exp(first - highest) / sum(math.exp(one - highest) for one in found.values())
