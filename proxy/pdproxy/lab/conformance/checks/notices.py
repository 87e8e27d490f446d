"""Checks of notices: each rank tells that the KV is there, D is not asked before, and all goes on where none comes."""

from __future__ import annotations

import time

from pdproxy.lab.check.engines import Miss
from pdproxy.lab.conformance import stand
from pdproxy.lab.conformance.asking import Place
from pdproxy.lab.conformance.bench import PROMPTS, Bench
from pdproxy.lab.conformance.check import Check
from pdproxy.lab.conformance.checks.answers import against_others
from pdproxy.lab.conformance.questions import CHAT_STREAM, COMPLETION
from pdproxy.lab.conformance.results import FailedError, NotJudgedError
from pdproxy.lab.conformance.tap import Leg
from pdproxy.observe.events import Event, KvNoticed, KvWaited
from pdproxy.wire.request import Alone


async def each_rank(bench: Bench) -> str:
    """Each rank tells once."""
    if bench.contract.handle_from_notice is not None:
        return await _told(bench)
    split = await bench.split(bench.question(COMPLETION), alone_for=Alone.KV_LATE.value)  # which is told below
    tap = bench.stand.tap
    heard = [event.result for event in tap.events(KvNoticed, split.since)]
    waits = tap.events(KvWaited, split.since)
    if not waits:
        raise FailedError("the proxy did not wait for any notice")
    if late := [wait for wait in waits if wait.result != "ready"]:
        silent = ", ".join(late[0].missing)
        raise FailedError(f"{len(heard)} notices came in {late[0].seconds:.1f} s; silent ranks: {silent or 'none'}")
    if "double" in heard or "undecodable" in heard:
        raise FailedError(f"of {len(heard)} notices some were double or could not be read: {', '.join(heard)}")
    count = sum(result in ("awaited", "early") for result in heard)
    return f"{count} notice{'' if count == 1 else 's'}, the last {waits[0].seconds * 1000:.0f} ms after P's answer"


async def _told(bench: Bench) -> str:
    """P tells of its handle, D that it has loaded; how many ranks there are does not matter."""
    split = await bench.split(bench.question(COMPLETION))
    tap = bench.stand.tap

    def heard() -> set[str]:
        return {event.event for event in tap.events(KvNoticed, split.since)}

    wanted = {"ready", "loaded"}
    if not await tap.until(lambda: wanted <= heard(), bench.options.settle):
        raise FailedError(f"no notice was {' or '.join(sorted(wanted - heard()))}: is the notifier in both engines?")
    return f"notices that came: {', '.join(sorted(heard()))}"


async def waited(bench: Bench) -> str:
    """D is asked when the KV is there, and not before."""
    seen = []
    for shape in (COMPLETION, CHAT_STREAM):
        split = await bench.split(bench.question(shape))
        tap = bench.stand.tap
        told = tap.place(_is_ready, split.since)
        asked = tap.place(lambda entry: isinstance(entry, Leg) and entry.url == bench.decode.url, split.since)
        if told is None or (asked is not None and asked < told):
            raise FailedError(f"for a {shape.words} D was asked before the notices had come")
        seen.append(shape.words)
    return f"a {' and a '.join(seen)}: D was asked when the last notice had come"


def _is_ready(entry: Leg | Event) -> bool:
    return isinstance(entry, KvWaited) and entry.result == "ready"


async def missing(bench: Bench) -> str:
    """Without notices there is an answer after the deadline, or the error that the settings want."""
    seconds, pool = bench.options.silence, bench.settings.pool
    prefill, decode = (
        next(node for node in pool.nodes if node.url == engine.url) for engine in (bench.prefill, bench.decode)
    )
    deaf = stand.with_wait(stand.settings_for(bench.settings, prefill, decode, bench.stand.key, notices=False), seconds)
    async with stand.stand(deaf, bench.stand.key, any_port=True) as alone:
        if (reason := await stand.ready(alone, bench.options.settle)) is not None:
            raise FailedError(f"a second proxy does not pair the engines: {reason}")
        if bench.has_notices and bench.settings.kv_ready.on_timeout == "fail":
            return await _refused(bench, alone)
        asked, begun = bench.question(COMPLETION), time.monotonic()
        # What was pushed but not told of must not be read: then an engine computes the prompt, alone.
        split = await bench.split(
            asked, alone, None if bench.contract.holder.late_kv_may_be_read else Alone.KV_LATE.value
        )
        took = time.monotonic() - begun
        if bench.contract.handle_from_notice is None and not [
            wait for wait in alone.tap.events(KvWaited, 0) if wait.result == "timeout"
        ]:
            raise FailedError("the proxy did not wait for notices")
        different, judged = await against_others(bench, split)
        if different:
            raise FailedError(f"without notices the answer has {', '.join(different)}")
        return f"the answer came after {took:.1f} s, and is that of {judged}"


async def _refused(bench: Bench, deaf: stand.Stand) -> str:
    """See that a prompt fails if no notice comes for it."""
    for _ in range(PROMPTS):
        asked, begun = bench.question(COMPLETION), time.monotonic()
        said = await bench.client.ask(Place(deaf.url, deaf.key), asked)
        if isinstance(said, Miss):
            if said.status != 504:
                raise FailedError(f"kv_ready.on_timeout is fail, and without notices: {said.text}")
            return f"504 after {time.monotonic() - begun:.1f} s, as kv_ready.on_timeout=fail wants it"
        ended = await deaf.tap.ended(asked.request_id, bench.options.settle)
        if ended is None or ended.legs[0].why_alone != Alone.FIRST_TOKEN.value:
            raise FailedError("kv_ready.on_timeout is fail, and without notices came an answer")
    raise NotJudgedError(f"P's first token can't be handed over, of {PROMPTS} prompts: nothing was waited for")


def _none(bench: Bench) -> str | None:
    if bench.has_notices or bench.contract.handle_from_notice is not None:
        return None
    return f"with {bench.contract.name} P's answer itself tells that the KV is there"


def _no_wait(bench: Bench) -> str | None:
    return (
        None
        if bench.has_notices
        else f"with {bench.contract.name} D is asked at P's answer, if not before: nothing waits"
    )


CHECKS = (
    Check("notice_each_rank", "a completion; the notices that came for it were counted", each_rank, _none),
    Check(
        "notice_wait",
        "a completion and a streamed chat; what the proxy sent and heard was looked at in order",
        waited,
        _no_wait,
    ),
    Check(
        "notice_missing",
        "a completion through a second proxy that no engine knows, and so none tells; its deadlines.kv_ready is short",
        missing,
        _none,
    ),
)
