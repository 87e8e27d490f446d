"""Sends requests through pairs of engines and reads their counters: one pair at a time, so that the
counts belong to it.

`compatibility` decides which pairs may be tried; `rules` judge the results.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable

from msgspec import structs

from pdproxy.check import prompts
from pdproxy.check.back import BackProbe
from pdproxy.check.compatibility import common_model, why_incompatible
from pdproxy.check.engines import NoAnswer, complete, scrape
from pdproxy.check.facts import (
    CheckFacts,
    EngineFacts,
    Generated,
    HandleExpiry,
    LoadFailurePolicy,
    PairEnd,
    PairFacts,
    Split,
)
from pdproxy.check.handles import Handles, with_other_engine
from pdproxy.check.http_client import HttpClient
from pdproxy.check.metrics import EngineMetrics
from pdproxy.check.options import CheckOptions
from pdproxy.settings.transfer import pairs_to_try
from pdproxy.transfer.contract import NO_DISPATCH
from pdproxy.wire.request import Parsed

_SAFE_SINCE = (0, 32)
"""The first version of vLLM in which a handle of an unknown engine is known to do no harm."""


class PairProbe:
    """Tries the pairs of one check. `mark` returns a new text at each call."""

    def __init__(
        self, http: HttpClient, handles: Handles, options: CheckOptions, mark: Callable[[], str]
    ) -> None:
        self._http, self._handles, self._options, self._mark = http, handles, options, mark
        self._back = BackProbe(http, handles, options)

    async def pair(self, prefill: EngineFacts, decode: EngineFacts) -> PairFacts:
        """Send a request through a pair; once more if its answer differs from D's own."""
        facts = PairFacts(prefill=prefill.url, decode=decode.url)
        if why := why_incompatible(prefill, decode):
            facts.tries = (Split(end="untried", text=why),)
            return facts
        for _ in range(2):
            facts.tries += (await self._split(prefill, decode),)
            if not facts.last.differs:
                break
        return facts

    async def lease(self, prefill: EngineFacts, decode: EngineFacts) -> HandleExpiry | None:
        """Leave a handle unused for a while and watch whether its lease ends; `decode` must be able
        to release it.
        """
        model, parsed = self._prompt(prefill, decode)
        before = await scrape(self._http, prefill.url)
        handle = await self._handles.take(prefill, parsed, self._id("lease"))
        if isinstance(handle, str) or before is None:
            return None
        begun, held, ended = time.monotonic(), False, None
        while ended is None and (waited := time.monotonic() - begun) < self._options.lease_watch:
            now = await scrape(self._http, prefill.url)
            if now is not None:
                gone = held and now.kv_usage <= before.kv_usage and not before.busy
                held = held or now.kv_usage > before.kv_usage
                ended = waited if now.expired > before.expired or gone else None
            if ended is None:
                await asyncio.sleep(min(self._options.poll, self._options.lease_watch))
        if ended is None:
            await self._handles.release(prefill, decode.url, model, handle, before.kv_usage)
        return HandleExpiry(self._options.lease_watch, ended)

    async def policy(self, prefill: EngineFacts, decode: EngineFacts) -> LoadFailurePolicy:
        """Send D a handle of an engine that doesn't exist, and see whether it fails or computes;
        then release P's.
        """
        if not _known_safe(decode.version):
            return LoadFailurePolicy(why_not=f"not tried with vLLM {decode.version or '?'}")
        model, parsed = self._prompt(prefill, decode)
        before = await scrape(self._http, prefill.url)
        handle = await self._handles.take(prefill, parsed, self._id("policy"))
        if isinstance(handle, str):
            return LoadFailurePolicy(why_not=handle)
        foreign = with_other_engine(handle, str(uuid.UUID(int=0)))
        body = self._handles.contract.decode(parsed, parsed.prompts[0], foreign, NO_DISPATCH).body
        answer = await complete(self._http, decode.url, body, self._id("policy"))
        await self._handles.release(
            prefill, decode.url, model, handle, before.kv_usage if before else 0.0
        )
        if isinstance(answer, Generated):
            await self._back.back(prefill, decode, model, answer.kept, None)
            return LoadFailurePolicy("recompute")
        return (
            LoadFailurePolicy("fail")
            if answer.status == 500
            else LoadFailurePolicy(why_not=answer.text)
        )

    async def _split(self, prefill: EngineFacts, decode: EngineFacts) -> Split:
        model, parsed = self._prompt(prefill, decode)
        held, counted = await asyncio.gather(
            scrape(self._http, prefill.url), scrape(self._http, decode.url)
        )
        handle = await self._handles.take(prefill, parsed, self._id("prefill"))
        if isinstance(handle, str):
            prefill.no_handle = handle
            return Split(end="no_handle", text=handle)
        due = _due(handle.prompt_tokens, decode.block_size or 1)
        usage = held.kv_usage if held is not None else 0.0
        begun = time.monotonic()
        body = self._handles.contract.decode(parsed, parsed.prompts[0], handle, NO_DISPATCH).body
        answer = await complete(self._http, decode.url, body, self._id("decode"))
        split = Split(
            end="answered",
            prompt_tokens=handle.prompt_tokens,
            due=due,
            seconds=time.monotonic() - begun,
            counted=counted is not None and bool(counted.by_source),
        )
        if isinstance(answer, NoAnswer):
            # A silent engine may still fetch the KV: a release now could free blocks that are being
            # read.
            back = not answer.silent and await self._handles.release(
                prefill, decode.url, model, handle, usage
            )
            failed = _increase(counted, await scrape(self._http, decode.url))[1]
            end: PairEnd = "silent" if answer.silent else "refused"
            return structs.replace(split, end=end, text=answer.text, failed=failed, kept=not back)
        moved, failed = await self._moved(decode.url, counted, due)
        if moved >= due:
            freed = await self._handles.freed(prefill.url, usage, self._options.settle)
        else:
            freed = await self._handles.release(prefill, decode.url, model, handle, usage)
        busy = held is None or held.busy  # the KV of other requests comes and goes: no conclusion
        goes_back = await self._back.back(prefill, decode, model, answer.kept, counted)
        alone = await complete(
            self._http, decode.url, prompts.salted(parsed, self._mark()), self._id("alone")
        )
        return structs.replace(
            split,
            moved=moved,
            failed=failed,
            answer=answer,
            alone=alone if isinstance(alone, Generated) else None,
            kept=not freed and not busy,
            back=goes_back,
        )

    async def _moved(self, decode: str, before: EngineMetrics | None, due: int) -> tuple[int, int]:
        """Return the prompt tokens that D has received and the transfers that failed, since
        `before`; counters may lag.
        """
        end = time.monotonic() + self._options.settle
        while True:
            is_last = time.monotonic() >= end
            moved, failed = _increase(before, await scrape(self._http, decode))
            if moved >= due or before is None or is_last:
                return moved, failed
            await asyncio.sleep(self._options.poll)

    def _prompt(self, prefill: EngineFacts, decode: EngineFacts) -> tuple[str, Parsed]:
        limits = [
            limit for limit in (prefill.max_model_len, decode.max_model_len) if limit is not None
        ]
        text = prompts.counting(self._mark(), decode.block_size or 1, min(limits, default=None))
        model = common_model(prefill, decode)
        return model, prompts.parsed(model, text)

    def _id(self, what: str) -> str:
        return f"pdproxy-check-{what}-{self._mark()}"


async def try_pairs(probe: PairProbe, facts: CheckFacts, lease_watch: float) -> None:
    """Try all pairs, then the leases, then what D does when KV can't be loaded. Stores the results
    in `facts`.
    """
    prefills = [engine for engine in facts.engines if engine.role in ("prefill", "any")]
    decodes = [engine for engine in facts.engines if engine.role in ("decode", "any")]
    tried = {(one.url, other.url) for one, other in pairs_to_try(facts.settings.pool)}
    silent: set[str] = set()
    for prefill in prefills:
        for decode in decodes:
            if (prefill.url, decode.url) not in tried:
                continue  # the settings keep the proxy from pairing them, or others are enough
            if decode.url in silent:
                untried = Split(
                    end="untried", text=f"{decode.url} did not answer an earlier request"
                )
                facts.pairs.append(
                    PairFacts(prefill=prefill.url, decode=decode.url, tries=(untried,))
                )
                continue
            if prefill.no_handle:
                untried = Split(end="no_handle", text=prefill.no_handle)
                facts.pairs.append(
                    PairFacts(prefill=prefill.url, decode=decode.url, tries=(untried,))
                )
                continue
            pair = await probe.pair(prefill, decode)
            facts.pairs.append(pair)
            if pair.last.end == "silent":
                silent.add(decode.url)
    proven = [
        (p, d) for p in prefills for d in decodes for pair in facts.pairs if _proven(pair, p, d)
    ]
    with_lease = {p.url: (p, d) for p, d in reversed(proven)}
    if lease_watch > 0:
        leases = await asyncio.gather(*(probe.lease(p, d) for p, d in with_lease.values()))
        for (p, _), lease in zip(with_lease.values(), leases, strict=True):
            p.lease = lease
    for p, d in {d.url: (p, d) for p, d in reversed(proven)}.values():
        d.policy = await probe.policy(p, d)


def _proven(pair: PairFacts, prefill: EngineFacts, decode: EngineFacts) -> bool:
    return pair.prefill == prefill.url and pair.decode == decode.url and pair.last.kv_moved


def _due(prompt_tokens: int, block: int) -> int:
    """Return how many tokens must have moved: all whole blocks, except the last one if there are
    several.

    Some models (hybrid ones, those with multi-token prediction) compute a prompt's last tokens
    again on D.
    """
    whole = prompt_tokens // block
    return (whole if whole <= 1 else whole - 1) * block


def _increase(before: EngineMetrics | None, after: EngineMetrics | None) -> tuple[int, int]:
    if before is None or after is None:
        return 0, 0
    return int(after.external - before.external), int(
        after.failed_transfers - before.failed_transfers
    )


def _known_safe(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= _SAFE_SINCE
