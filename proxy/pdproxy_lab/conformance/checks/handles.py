"""Checks of KV that P holds: it can be released, and its lease ends if it is not."""

from __future__ import annotations

import asyncio
import time

from pdproxy.check.handles import Handles
from pdproxy.check.options import CheckOptions
from pdproxy.kit.ids import mint
from pdproxy.transfer.contract import (
    NO_DISPATCH,
    Dispatch,
    Handle,
    HeldByDecode,
    HeldByPrefill,
    PushedToDecode,
    minted_id,
)
from pdproxy_lab.conformance import requests
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.pair_under_test import KvUsage, PairUnderTest
from pdproxy_lab.conformance.requests import COMPLETION
from pdproxy_lab.conformance.results import FailedError, NotJudgedError

_EPSILON = 1e-9


async def release(pair: PairUnderTest) -> str:
    """A handle that is not needed is released."""
    handles, before, handle = await _taken(pair)
    begun = time.monotonic()
    if not await handles.release(pair.prefill, pair.decode.url, pair.model, handle, before.prefill):
        raise FailedError(
            f"P still holds the KV {time.monotonic() - begun:.1f} s after D was asked to release it"
        )
    if await _expired(pair, before):
        raise FailedError("the end of the lease freed P's KV, not D")
    return f"P's KV usage was back {time.monotonic() - begun:.1f} s after D was asked to release it"


async def lease(pair: PairUnderTest) -> str:
    """A handle that is not used ends with its lease."""
    handles, before, handle = await _taken(pair)
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < pair.options.lease_watch:
        if await handles.freed(pair.prefill.url, before.prefill, 0):
            counted = ", and P counted it as expired" if await _expired(pair, before) else ""
            return f"P's KV usage was back after {waited:.1f} s{counted}"
        await asyncio.sleep(pair.options.poll)
    await handles.release(pair.prefill, pair.decode.url, pair.model, handle, before.prefill)
    watched, known = pair.options.lease_watch, _lease_of(pair)
    if known is not None and watched <= known:
        raise NotJudgedError(f"--lease-watch {watched:g} is too short: P's lease is {known:g} s")
    raise FailedError(f"P held the KV for all of {watched:g} s (--lease-watch)")


def _lease_of(pair: PairUnderTest) -> float | None:
    """Return for how many seconds P keeps KV that nobody reads: by its settings, or as its
    connector does; None if that is not known.
    """
    holder = pair.contract.holder
    usual = holder.lease if isinstance(holder, HeldByPrefill) else None
    return pair.stand.proxy.engines[pair.prefill.url].kv_lease or usual


async def _taken(pair: PairUnderTest) -> tuple[Handles, KvUsage, Handle]:
    """Have P prefill a prompt, and check that it holds the KV."""
    contract, options = pair.contract, pair.options
    if contract.needs_ids or contract.needs_receiver:
        raise NotJudgedError("a handle of this contract can't be taken without the proxy")
    settings = CheckOptions(timeout=options.timeout, settle=options.settle, poll=options.poll)
    handles = Handles(pair.http, contract, settings)
    before = await pair.usage()
    asked = pair.request(COMPLETION)
    handle = await handles.take(
        pair.prefill, requests.as_parsed(asked), asked.request_id, _dispatch(pair)
    )
    if isinstance(handle, str):
        raise FailedError(f"P returns no usable handle: {handle}")
    end = time.monotonic() + options.settle
    while True:
        is_last = time.monotonic() >= end
        now = await pair.scraped(pair.prefill.url)
        if now is not None and now.kv_usage > before.prefill + _EPSILON:
            return handles, before, handle
        if is_last:
            raise FailedError(
                "P returned a handle, but its KV usage does not show that it holds KV"
            )
        await asyncio.sleep(options.poll)


async def _expired(pair: PairUnderTest, before: KvUsage) -> bool:
    now = await pair.scraped(pair.prefill.url)
    return now is not None and now.expired > before.expired


def _dispatch(pair: PairUnderTest) -> Dispatch:
    if not pair.contract.needs_leg_id:
        return NO_DISPATCH
    peers = pair.stand.proxy.engines[pair.prefill.url].run.peers
    return Dispatch(mint(), prefill_peer=peers.take_turn())


def _nothing_held(pair: PairUnderTest) -> str | None:
    if pair.contract.leg_id is not minted_id:
        return (
            f"with {pair.contract.name} legs have ids that name both engines: only the proxy "
            f"makes them"
        )
    match pair.contract.holder:
        case HeldByPrefill():
            return None
        case PushedToDecode(release_body=body) if body is not None:
            return None
        case HeldByDecode():
            return (
                f"with {pair.contract.name} the decode engine holds it, in a buffer without a "
                f"counter"
            )
        case _:
            return f"with {pair.contract.name} the prefill engine holds no KV for others"


def _not_watched(pair: PairUnderTest) -> str | None:
    if (why := _nothing_held(pair)) is not None:
        return why
    holder, watched = pair.contract.holder, pair.options.lease_watch
    if (
        isinstance(holder, PushedToDecode)
        and holder.stuck_for is not None
        and watched <= holder.stuck_for
    ):
        return f"its lease is {holder.stuck_for:g} s, --lease-watch {watched:g}"
    return "--lease-watch 0" if not watched else None


CHECKS = (
    Check(
        "release",
        "P prefilled a prompt, D was asked to release its KV unread; P's KV usage was watched",
        release,
        _nothing_held,
    ),
    Check(
        "lease",
        "P prefilled a prompt that was not used; P's KV usage was watched",
        lease,
        _not_watched,
        lambda pair: pair.options.lease_watch,
    ),
)
