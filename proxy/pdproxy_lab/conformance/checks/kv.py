"""Checks of the pair: does the proxy pair it, does KV move by its own counters, is a short prompt
not split, is nothing left?
"""

from __future__ import annotations

import asyncio
from functools import partial

from pdproxy.check.compatibility import why_incompatible
from pdproxy.check.engines import NoAnswer
from pdproxy_lab.conformance import requests, stand
from pdproxy_lab.conformance.api_client import Endpoint
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.pair_under_test import KvUsage, PairUnderTest
from pdproxy_lab.conformance.requests import CHAT, COMPLETION, Shape
from pdproxy_lab.conformance.results import FailedError, NotJudgedError


async def pair(pair: PairUnderTest) -> str:
    """The proxy pairs the two engines."""
    for engine in (pair.prefill, pair.decode):
        if engine.trouble is not None:
            raise FailedError(f"{engine.url}: {engine.trouble.text}")
    if why := why_incompatible(pair.prefill, pair.decode):
        raise FailedError(why)
    if (reason := await stand.ready(pair.stand, pair.options.timeout / 2)) is not None:
        raise FailedError(f"the proxy does not pair them: {reason}")
    versions = " and ".join(
        sorted({f"vLLM {engine.version or '?'}" for engine in (pair.prefill, pair.decode)})
    )
    return f"{versions}, model {pair.model}, blocks of {pair.decode.block_size} tokens"


async def moved(pair: PairUnderTest) -> str:
    """KV moves, for a completion and for a chat."""
    seen = [await _moved(pair, shape) for shape in (COMPLETION, CHAT)]
    return "of " + ", of ".join(seen)


async def _moved(pair: PairUnderTest, shape: Shape) -> str:
    split = await pair.split(pair.request(shape))
    prompt, what = split.answer.prompt_tokens, shape.name
    due = pair.due(prompt)
    if not due:
        raise NotJudgedError(
            f"the context is too short for a prompt of {pair.transfer_unit} tokens, which is the "
            f"transfer unit"
        )
    if not split.asked_decode:
        raise FailedError(f"D was not asked to decode a {what}")
    if split.arrived is None:
        raise NotJudgedError("D has no vllm:prompt_tokens_by_source_total")
    if split.arrived.all < due or not split.arrived.moved:
        raise FailedError(
            f"D answered a {what}, but counted {split.arrived.moved} of {prompt} prompt tokens "
            f"as external_kv_transfer "
            f"({due} were expected): it computed the others itself"
        )
    return f"{prompt} tokens of a {what} {split.arrived.moved} moved"


async def short(pair: PairUnderTest) -> str:
    """One engine serves a prompt that is too short to move, and P is not asked."""
    block = pair.decode.block_size or 1
    if not requests.short_text(pair.mark(), block, block):
        raise NotJudgedError(f"no prompt is surely shorter than a block of {block} tokens")
    least = pair.contract.min_tokens(requests.as_parsed(pair.request(COMPLETION)))
    sizes = [block, least] if least > block else [block]
    before = await pair.usage()
    seen = []
    for size in sizes:
        asked = pair.request(COMPLETION, partial(requests.short_text, block=block, size=size))
        since = pair.stand.tap.mark()
        answer = await pair.client.send(Endpoint(pair.stand.url, pair.stand.key), asked)
        if isinstance(answer, NoAnswer):
            raise FailedError(f"a prompt under {size} tokens: {answer.text}")
        ended = await pair.stand.tap.ended(asked.request_id, pair.options.settle)
        if answer.prompt_tokens >= size:
            raise NotJudgedError(
                f"a prompt that should be under {size} tokens has {answer.prompt_tokens}"
            )
        why = ended.legs[0].why_alone if ended is not None and ended.legs else None
        if pair.stand.tap.legs(since, pair.prefill.url) or why != "short_prompt":
            raise FailedError(
                f"a prompt of {answer.prompt_tokens} tokens was given to P, which can move no "
                f"whole {size}"
            )
        alone = await pair.alone(pair.at(pair.decode.url), asked)
        if different := answer.differences(alone, "D"):
            raise FailedError(
                f"a prompt of {answer.prompt_tokens} tokens has {', '.join(different)}"
            )
        seen.append(f"{answer.prompt_tokens} tokens")
    await pair.wait_released(before)
    return f"{' and '.join(seen)}: P was not asked, the answer is D's own"


async def left(pair: PairUnderTest) -> str:
    """Nothing is left in the proxy or on the engines, which have not been restarted."""
    for engine in (pair.prefill, pair.decode):
        now = await pair.scraped(engine.url)
        if now is None:
            raise FailedError(f"{engine.url} no longer has readable /metrics")
        if engine.metrics is not None and now.started != engine.metrics.started:
            raise FailedError(f"{engine.url} was restarted during the run")
        health = await pair.http.get(engine.url, "/health")
        if getattr(health, "status", 0) != 200:
            raise FailedError(f"{engine.url} is no longer healthy")
    first = [
        engine.metrics.kv_usage if engine.metrics is not None else 0.0
        for engine in (pair.prefill, pair.decode)
    ]
    await asyncio.sleep(pair.options.poll)
    usage = await pair.usage()
    await pair.wait_released(KvUsage(first[0], first[1], usage.expired))
    return "both engines are healthy, were not restarted, and hold no more KV than at the beginning"


def _splits_all(pair: PairUnderTest) -> str | None:
    short = pair.contract.capabilities.short_prompts
    return f"with {pair.contract.name} prompts of any length move" if short else None


CHECKS = (
    Check("pair", "each engine was asked for its identity, the proxy whether it pairs them", pair),
    Check(
        "kv_moved",
        "a completion and a chat, each with a prompt that no engine has cached; D's "
        "vllm:prompt_tokens_by_source_total was read"
        " before and after",
        moved,
    ),
    Check(
        "short_prompt",
        "prompts shorter than the transfer unit were sent through the proxy, and to D alone",
        short,
        _splits_all,
    ),
)
LAST = (
    Check(
        "nothing_left",
        "/health, /metrics and the proxy's own records were read after all other checks",
        left,
    ),
)
