"""Checks of notices: each rank sends one, D is not asked before, and requests are served if no
notice comes.
"""

from __future__ import annotations

import time

from pdproxy.check.engines import NoAnswer
from pdproxy.observe.events import Event, KvNoticed, KvWaited
from pdproxy.wire.route_form import Alone
from pdproxy_lab.conformance import stand
from pdproxy_lab.conformance.api_client import Endpoint
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.checks.answers import against_others
from pdproxy_lab.conformance.pair_under_test import MAX_PROMPTS, PairUnderTest
from pdproxy_lab.conformance.requests import CHAT_STREAM, COMPLETION
from pdproxy_lab.conformance.results import FailedError, NotJudgedError
from pdproxy_lab.conformance.tap import TappedLeg


async def each_rank(pair: PairUnderTest) -> str:
    """Each rank sends one notice."""
    if pair.contract.handle_from_notice is not None:
        return await _handle_notices(pair)
    # reported below
    split = await pair.split(pair.request(COMPLETION), alone_for=Alone.KV_LATE.value)
    tap = pair.stand.tap
    received = [event.result for event in tap.events(KvNoticed, split.since)]
    waits = tap.events(KvWaited, split.since)
    if not waits:
        raise FailedError("the proxy did not wait for any notice")
    if late := [wait for wait in waits if wait.result != "ready"]:
        silent = ", ".join(late[0].missing)
        raise FailedError(
            f"{len(received)} notices came in {late[0].seconds:.1f} s; ranks that sent none: "
            f"{silent or 'none'}"
        )
    if "double" in received or "undecodable" in received:
        raise FailedError(
            f"of {len(received)} notices some were sent twice or could not be read: "
            f"{', '.join(received)}"
        )
    count = sum(result in ("awaited", "early") for result in received)
    return (
        f"{count} notice{'' if count == 1 else 's'}, the last {waits[0].seconds * 1000:.0f} ms "
        f"after P's answer"
    )


async def _handle_notices(pair: PairUnderTest) -> str:
    """P reports its handle, and D that it has loaded the KV; the number of ranks does not
    matter.
    """
    split = await pair.split(pair.request(COMPLETION))
    tap = pair.stand.tap

    def received() -> set[str]:
        return {event.event for event in tap.events(KvNoticed, split.since)}

    wanted = {"ready", "loaded"}
    if not await tap.until(lambda: wanted <= received(), pair.options.settle):
        raise FailedError(
            f"no notice was {' or '.join(sorted(wanted - received()))}: is the notifier in both "
            f"engines?"
        )
    return f"notices that came: {', '.join(sorted(received()))}"


async def waited(pair: PairUnderTest) -> str:
    """D is asked after the KV is there, not before."""
    seen = []
    for shape in (COMPLETION, CHAT_STREAM):
        split = await pair.split(pair.request(shape))
        tap = pair.stand.tap
        noticed = tap.place(_is_ready, split.since)
        asked = tap.place(
            lambda entry: isinstance(entry, TappedLeg) and entry.url == pair.decode.url, split.since
        )
        if noticed is None or (asked is not None and asked < noticed):
            raise FailedError(f"for a {shape.name} D was asked before the notices had come")
        seen.append(shape.name)
    return f"a {' and a '.join(seen)}: D was asked after the last notice"


def _is_ready(entry: TappedLeg | Event) -> bool:
    return isinstance(entry, KvWaited) and entry.result == "ready"


async def missing(pair: PairUnderTest) -> str:
    """Without notices there is an answer after the deadline, or the error of the settings."""
    seconds, pool = pair.options.silence, pair.settings.pool
    prefill, decode = (
        next(ledger_engine for ledger_engine in pool.nodes if ledger_engine.url == engine.url)
        for engine in (pair.prefill, pair.decode)
    )
    without = stand.with_wait(
        stand.settings_for(pair.settings, prefill, decode, pair.stand.key, notices=False), seconds
    )
    async with stand.stand(without, pair.stand.key) as alone:
        if (reason := await stand.ready(alone, pair.options.settle)) is not None:
            raise FailedError(f"a second proxy does not pair the engines: {reason}")
        if pair.has_notices and pair.settings.kv_ready.on_timeout == "fail":
            return await _refused(pair, alone)
        asked, begun = pair.request(COMPLETION), time.monotonic()
        # KV that was pushed without a notice must not be read: one engine computes the prompt
        # alone.
        split = await pair.split(
            asked, alone, None if pair.contract.holder.late_kv_may_be_read else Alone.KV_LATE.value
        )
        took = time.monotonic() - begun
        if pair.contract.handle_from_notice is None and not [
            wait for wait in alone.tap.events(KvWaited, 0) if wait.result == "timeout"
        ]:
            raise FailedError("the proxy did not wait for notices")
        different, judged = await against_others(pair, split)
        if different:
            raise FailedError(f"without notices: {', '.join(different)}")
        return f"the answer came after {took:.1f} s, and is the same as that of {judged}"


async def _refused(pair: PairUnderTest, alone: stand.Stand) -> str:
    """Check that a prompt fails if no notice comes for it."""
    for _ in range(MAX_PROMPTS):
        asked, begun = pair.request(COMPLETION), time.monotonic()
        answer = await pair.client.send(Endpoint(alone.url, alone.key), asked)
        if isinstance(answer, NoAnswer):
            if answer.status != 504:
                raise FailedError(f"kv_ready.on_timeout is fail; without notices: {answer.text}")
            return (
                f"504 after {time.monotonic() - begun:.1f} s, as kv_ready.on_timeout: fail requires"
            )
        ended = await alone.tap.ended(asked.request_id, pair.options.settle)
        if ended is None or ended.legs[0].why_alone != Alone.FIRST_TOKEN.value:
            raise FailedError(
                "kv_ready.on_timeout is fail, but without notices there was an answer"
            )
    raise NotJudgedError(
        f"P's first token can't be handed over, of {MAX_PROMPTS} prompts: the proxy did not wait"
    )


def _none(pair: PairUnderTest) -> str | None:
    if pair.has_notices or pair.contract.handle_from_notice is not None:
        return None
    return f"with {pair.contract.name} P's answer itself shows that the KV is there"


def _no_wait(pair: PairUnderTest) -> str | None:
    return (
        None
        if pair.has_notices
        else f"with {pair.contract.name} D is asked at P's answer or before: the proxy does not "
        f"wait"
    )


CHECKS = (
    Check("notice_each_rank", "a completion; the notices for it were counted", each_rank, _none),
    Check(
        "notice_wait",
        "a completion and a streamed chat; the order of what the proxy sent and received was "
        "checked",
        waited,
        _no_wait,
    ),
    Check(
        "notice_missing",
        "a completion through a second proxy with a short deadlines.kv_ready, to which no engine "
        "sends notices",
        missing,
        _none,
    ),
)
