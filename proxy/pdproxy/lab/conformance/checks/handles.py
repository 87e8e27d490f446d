"""Checks of KV that P holds for us: it can be given back, and if nobody does it ends by itself."""

from __future__ import annotations

import asyncio
import time

from pdproxy.lab.check.handles import Handles
from pdproxy.lab.check.options import Options as CheckOptions
from pdproxy.lab.conformance import questions
from pdproxy.lab.conformance.bench import Bench, Usage
from pdproxy.lab.conformance.check import Check
from pdproxy.lab.conformance.questions import COMPLETION
from pdproxy.lab.conformance.results import FailedError, NotJudgedError
from pdproxy.transfer.contract import Handle, HeldByDecode, HeldByPrefill

_NOTHING = 1e-9


async def release(bench: Bench) -> str:
    """A handle that nobody will decode from is given back."""
    handles, before, handle = await _taken(bench)
    begun = time.monotonic()
    if not await handles.give_back(bench.prefill, bench.decode.url, bench.model, handle, before.prefill):
        raise FailedError(f"P still holds the KV {time.monotonic() - begun:.1f} s after D was told to give it back")
    if await _expired(bench, before):
        raise FailedError("the end of its lease freed P's KV, not D")
    return f"P's KV usage was back {time.monotonic() - begun:.1f} s after D was told"


async def lease(bench: Bench) -> str:
    """A handle that is forgotten ends by itself."""
    handles, before, handle = await _taken(bench)
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < bench.options.lease_watch:
        if await handles.freed(bench.prefill.url, before.prefill, 0):
            counted = ", and P counted it as expired" if await _expired(bench, before) else ""
            return f"P's KV usage was back after {waited:.1f} s{counted}"
        await asyncio.sleep(bench.options.poll)
    await handles.give_back(bench.prefill, bench.decode.url, bench.model, handle, before.prefill)
    raise FailedError(f"P held the KV for all of {bench.options.lease_watch:g} s (--lease-watch)")


async def _taken(bench: Bench) -> tuple[Handles, Usage, Handle]:
    """Have P prefill a prompt for us, and see that it holds the KV."""
    contract, options = bench.contract, bench.options
    if contract.needs_ids or contract.needs_receiver:
        raise NotJudgedError("a handle of this contract can't be taken without the proxy")
    settings = CheckOptions(timeout=options.timeout, settle=options.settle, poll=options.poll)
    handles = Handles(bench.asker, contract, settings)
    before = await bench.usage()
    asked = bench.question(COMPLETION)
    handle = await handles.take(bench.prefill, questions.as_parsed(asked), asked.request_id)
    if isinstance(handle, str):
        raise FailedError(f"P gives no usable handle: {handle}")
    end = time.monotonic() + options.settle
    while True:
        now = await bench.scraped(bench.prefill.url)
        if now is not None and now.kv_usage > before.prefill + _NOTHING:
            return handles, before, handle
        if time.monotonic() >= end:
            raise FailedError("P gave a handle, and its KV usage does not show that it holds anything")
        await asyncio.sleep(options.poll)


async def _expired(bench: Bench, before: Usage) -> bool:
    now = await bench.scraped(bench.prefill.url)
    return now is not None and now.expired > before.expired


def _nothing_held(bench: Bench) -> str | None:
    match bench.contract.holder:
        case HeldByPrefill():
            return None
        case HeldByDecode():
            return f"with {bench.contract.name} the decode engine holds it, in a buffer that no counter shows"
        case _:
            return f"with {bench.contract.name} the prefill engine holds nothing for anybody"


def _not_watched(bench: Bench) -> str | None:
    return _nothing_held(bench) or ("--lease-watch 0" if not bench.options.lease_watch else None)


CHECKS = (
    Check(
        "release",
        "P prefilled a prompt, D was told to give its KV back unread; P's KV usage was watched",
        release,
        _nothing_held,
    ),
    Check(
        "lease",
        "P prefilled a prompt that nobody asked for again; P's KV usage was watched",
        lease,
        _not_watched,
        lambda bench: bench.options.lease_watch,
    ),
)
