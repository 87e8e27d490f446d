"""Checks of the pair itself: is it one, does KV move by the engines' own counters, is a short prompt left alone, is all over?"""

from __future__ import annotations

import asyncio
from functools import partial

from pdproxy.lab.check.engines import Miss
from pdproxy.lab.check.likeness import why_unpaired
from pdproxy.lab.conformance import questions, stand
from pdproxy.lab.conformance.asking import Place
from pdproxy.lab.conformance.bench import Bench, Usage
from pdproxy.lab.conformance.check import Check
from pdproxy.lab.conformance.questions import CHAT, COMPLETION, Shape
from pdproxy.lab.conformance.results import FailedError, NotJudgedError


async def pair(bench: Bench) -> str:
    """Two engines that the proxy takes as a pair."""
    for engine in (bench.prefill, bench.decode):
        if engine.trouble is not None:
            raise FailedError(f"{engine.url}: {engine.trouble.text}")
    if why := why_unpaired(bench.prefill, bench.decode):
        raise FailedError(why)
    if (reason := await stand.ready(bench.stand, bench.options.timeout / 2)) is not None:
        raise FailedError(f"the proxy does not pair them: {reason}")
    versions = " and ".join(sorted({f"vLLM {engine.version or '?'}" for engine in (bench.prefill, bench.decode)}))
    return f"{versions}, model {bench.model}, blocks of {bench.decode.block_size} tokens"


async def moved(bench: Bench) -> str:
    """KV moves, for a completion and for a chat."""
    seen = [await _moved(bench, shape) for shape in (COMPLETION, CHAT)]
    return "of " + ", of ".join(seen)


async def _moved(bench: Bench, shape: Shape) -> str:
    split = await bench.split(bench.question(shape))
    prompt, what = split.said.prompt_tokens, shape.words
    due = bench.due(prompt)
    if not due:
        raise NotJudgedError(f"the context is too short for a prompt of {bench.granule} tokens, which move as one")
    if not split.asked_decode:
        raise FailedError(f"D was never asked to go on with a {what}")
    if split.arrived is None:
        raise NotJudgedError("D has no vllm:prompt_tokens_by_source_total")
    if split.arrived.all < due or not split.arrived.moved:
        raise FailedError(
            f"D answered a {what}, and counted {split.arrived.moved} of {prompt} prompt tokens as external_kv_transfer "
            f"({due} were due): it computed them itself"
        )
    return f"{prompt} tokens of a {what} {split.arrived.moved} moved"


async def short(bench: Bench) -> str:
    """Prompts too short to move are served by one engine, with nothing left at P."""
    block = bench.decode.block_size or 1
    if not questions.under(bench.mark(), block, block):
        raise NotJudgedError(f"no prompt is surely shorter than a block of {block} tokens")
    least = bench.contract.min_tokens(questions.as_parsed(bench.question(COMPLETION)))
    sizes = [block, least] if least > block else [block]
    before = await bench.usage()
    seen = []
    for size in sizes:
        asked = bench.question(COMPLETION, partial(questions.under, block=block, size=size))
        since = bench.stand.tap.mark()
        said = await bench.client.ask(Place(bench.stand.url, bench.stand.key), asked)
        if isinstance(said, Miss):
            raise FailedError(f"a prompt under {size} tokens: {said.text}")
        ended = await bench.stand.tap.ended(asked.request_id, bench.options.settle)
        if said.prompt_tokens >= size:
            raise NotJudgedError(f"a prompt that should be under {size} tokens has {said.prompt_tokens}")
        why = ended.legs[0].why_alone if ended is not None and ended.legs else None
        if bench.stand.tap.legs(since, bench.prefill.url) or why != "short_prompt":
            raise FailedError(f"a prompt of {said.prompt_tokens} tokens was given to P, which can move no whole {size}")
        alone = await bench.alone(bench.at(bench.decode.url), asked)
        if different := said.differences(alone, "D"):
            raise FailedError(f"a prompt of {said.prompt_tokens} tokens has {', '.join(different)}")
        seen.append(f"{said.prompt_tokens} tokens")
    await bench.given_back(before)
    return f"{' and '.join(seen)}: P was not asked, the answer is D's own"


async def left(bench: Bench) -> str:
    """Nothing of all this is left: not in the proxy, not on the engines, which are those of the beginning."""
    for engine in (bench.prefill, bench.decode):
        now = await bench.scraped(engine.url)
        if now is None:
            raise FailedError(f"{engine.url} does not show its /metrics any more")
        if engine.metrics is not None and now.started != engine.metrics.started:
            raise FailedError(f"{engine.url} has been started anew meanwhile")
        health = await bench.asker.get(engine.url, "/health")
        if getattr(health, "status", 0) != 200:
            raise FailedError(f"{engine.url} is not healthy any more")
    first = [engine.metrics.kv_usage if engine.metrics is not None else 0.0 for engine in (bench.prefill, bench.decode)]
    await asyncio.sleep(bench.options.poll)
    usage = await bench.usage()
    await bench.given_back(Usage(first[0], first[1], usage.expired))
    return "both engines are healthy and the same as at the beginning, and hold no KV for anybody"


CHECKS = (
    Check("pair", "each engine was asked who it is, the proxy whether it pairs them", pair),
    Check(
        "kv_moved",
        "a completion and a chat, each with a prompt that nobody has cached; D's vllm:prompt_tokens_by_source_total was read"
        " before and after",
        moved,
    ),
    Check("short_prompt", "prompts that are under what moves as one went through the proxy, and to D alone", short),
)
LAST = (
    Check("nothing_left", "/health, /metrics and the proxy's own books were looked at when all else was over", left),
)
