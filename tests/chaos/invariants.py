"""What must be true of a run: while it lasts, in the calm after the faults, and once all is quiet.

Each check is a function that returns findings. A finding names the rule that was broken, and what
was seen.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pdproxy.app.compose import Proxy
from pdproxy.fleet.engine import Engine
from pdproxy.kit.tasks import Failures
from pdproxy.observe.events import Event, HandleEnded, MediaEncoded, RequestEnded
from pdproxy.serving.kv.custody import End
from pdproxy.transfer.contract import Contract, PushedToDecode
from pdproxy.upstream.client import EngineClient
from tests.chaos.clients import Outcome
from tests.chaos.finding import Finding, shortened
from tests.chaos.world import DEADLINES, LIMITS, ChaosEngine, World

SLACK = 2.0
"""Seconds beyond the deadlines: links that are slow, ticks of the clock, the abort of what is
late.
"""
PATIENCE = DEADLINES.queue + DEADLINES.total + SLACK + DEADLINES.client_body
"""Seconds in which a client has its whole answer or an error, whatever happens."""
_ATTEMPT = DEADLINES.connect + DEADLINES.prefill + DEADLINES.kv_ready + DEADLINES.first_token
STREAM = (
    DEADLINES.queue
    + DEADLINES.tokenize
    + DEADLINES.encode
    + LIMITS.attempts * (_ATTEMPT + DEADLINES.retry)
    + (LIMITS.continuations + 1) * DEADLINES.between_tokens
    + LIMITS.continuations * DEADLINES.continuation
    + 4 * SLACK
)
"""Seconds in which a stream that its client reads is over: its deadlines, and the time of its
tokens.
"""
_REFUSED = ("408", "401")
"""Statuses of requests that were refused before they were whole, of which there is another
event.
"""


def answered(outcomes: Iterable[Outcome]) -> list[Finding]:
    """No client gets a wrong answer, half of one, or none."""
    rules = {
        "wrong": "an answer is wrong",
        "cut": "an answer was cut off without an error",
        "silent": "no answer in time",
        "refused": "the proxy took no connection",
    }
    found = [
        Finding(rules[one.how], f"item {one.item}, request {one.ident}: {one.detail}")
        for one in outcomes
        if one.how in rules and not (one.slow and one.how in ("cut", "silent"))
    ]
    return shortened(found)


def calm(outcomes: Iterable[Outcome], served: Mapping[str, int], expired: int) -> list[Finding]:
    """Without faults each request is right unless its client leaves, each engine serves, and no KV
    is left to its lease.

    `served`: generating requests by engine; `expired`: leases that ended by their time.
    """
    found = [
        Finding(
            "without faults each request is right", f"request {one.ident}: {one.how} {one.detail}"
        )
        for one in outcomes
        if one.how not in ("right", "left")
    ]
    if expired:
        found.append(
            Finding("without faults KV is released", f"{expired} handles were left to their leases")
        )
    found += [
        Finding("each engine serves again", f"{name} got no request")
        for name, count in served.items()
        if not count
    ]
    return shortened(found)


def reported(outcomes: Sequence[Outcome], events: Iterable[Event]) -> list[Finding]:
    """Each request that was sent whole is reported once, and as its client saw it; none is reported
    twice.
    """
    reports: dict[str, list[RequestEnded]] = {}
    for event in events:
        if isinstance(event, RequestEnded):
            reports.setdefault(event.request_id, []).append(event)
    found = []
    for one in outcomes:
        own = reports.pop(one.ident, [])
        if len(own) > 1:
            found.append(
                Finding("a request ends once", f"request {one.ident} has {len(own)} reports")
            )
        elif not own and (
            one.how == "right" or (one.how == "error" and one.detail not in _REFUSED)
        ):
            found.append(
                Finding(
                    "each request is reported", f"request {one.ident} ({one.how}) has no report"
                )
            )
        elif own and one.how == "right" and own[0].outcome != "ok":
            found.append(
                Finding(
                    "reports are true",
                    f"request {one.ident} was right, its report says {own[0].outcome}",
                )
            )
        elif own and one.how == "error" and own[0].outcome == "ok":
            found.append(
                Finding("reports are true", f"request {one.ident} was an error, its report says ok")
            )
        found += [
            Finding(
                "no request outlives deadlines.total",
                f"request {one.ident} took {report.total_s:.2f} s",
            )
            for report in own
            if report.total_s > DEADLINES.total + SLACK
        ]
        found += [
            Finding(
                "each wait of a stream has its deadline",
                f"request {one.ident} took {report.total_s:.2f} s",
            )
            for report in own
            if report.stream and not one.slow and report.total_s > STREAM
        ]
    found += [Finding("each report has its request", f"report of {name}") for name in reports]
    return shortened(found)


def left_to_leases(contract: Contract, events: Iterable[Event]) -> int:
    """Return how many handles only a lease could free: no decode engine was asked with them, and
    the contract has no release.
    """
    holder = contract.holder
    if not isinstance(holder, PushedToDecode) or holder.release_body is not None:
        return 0
    return sum(isinstance(event, HandleEnded) and event.end == End.LOST.label for event in events)


def balanced(world: World, events: Iterable[Event]) -> list[Finding]:
    """The metrics count what was reported: requests by outcome, handles that ended, and media."""
    counts: Counter[str] = Counter()
    for event in events:
        counts[type(event).__name__] += event.count if isinstance(event, MediaEncoded) else 1
    sums: Counter[str] = Counter()
    for proxy in world.proxies:
        for family in proxy.metrics.collect():
            for sample in family.samples:
                sums[sample.name] += int(sample.value)
    pairs = (
        ("pdproxy_requests_total", "RequestEnded"),
        ("pdproxy_kv_handles_ended_total", "HandleEnded"),
        ("pdproxy_encoded_media_total", "MediaEncoded"),
    )
    return [
        Finding("books balance", f"{name} is {sums[name]}, events {kind}: {counts[kind]}")
        for name, kind in pairs
        if sums[name] != counts[kind]
    ]


def lasting(
    before: Iterable[str], now: Iterable[str], timers_before: int, timers: int
) -> list[Finding]:
    """There are no more tasks and timers than before the load, by their names."""
    more = Counter(now) - Counter(before)
    found = [Finding("tasks end", f"{count} more of {name}") for name, count in more.items()]
    if timers > timers_before:
        found.append(Finding("timers are cancelled", f"{timers} instead of {timers_before}"))
    return shortened(found)


def garbage() -> list[Finding]:
    """No request leaves objects of the proxy to the garbage collector: what is in reference cycles
    would pause the loop later.

    Collects what came since `gc.freeze`. An engine that was removed is a cycle with its parts, and
    so are its client and its probe, but these are few.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    known = {id(one) for one in gc.garbage}
    removed = [one for one in gc.garbage if isinstance(one, Engine | EngineClient | Failures)]
    while removed:
        if id(one := removed.pop()) in known:
            known.discard(id(one))
            removed += [part for part in gc.get_referents(one) if id(part) in known]
    kinds = Counter(
        type(one).__qualname__
        for one in gc.garbage
        if id(one) in known and _is_ours(type(one).__module__)
    )
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()  # frees it
    return shortened(
        [Finding("no garbage", f"{count} of {kind}") for kind, count in sorted(kinds.items())]
    )


def _is_ours(module: str) -> bool:
    return module.startswith("pdproxy.")


def quiet(world: World) -> list[Finding]:
    """Nothing is held: no lease, no handle, no place, no connection, no block."""
    found = [finding for proxy in world.proxies for finding in _held(proxy)]
    found += [finding for books in world.books for finding in books.findings()]
    for engine in world.engines:
        sim = engine.sim.engine
        # Where engines push, nothing but a restart frees what a decode engine has reserved for KV
        # that will not come. The proxy counts that for as long as it has the engine, but for
        # requests that were closed while their KV was on its way: nothing shows whether it came.
        closed = sum(any(books.was_closed(one) for books in world.books) for one in sim.awaited)
        stuck = sum(
            proxy.custodian.stuck.snapshot(proxy.custodian.now()).get(engine.url, (0, 0.0))[0]
            for proxy in world.proxies
        )
        if not sim.awaited and (usage := max(stats.kv_cache_usage for stats in sim.rank_stats)):
            found.append(
                Finding("blocks are freed", f"{engine.name} uses {usage:.4f} of its blocks")
            )
        if sim.handles or len(sim.awaited) > stuck + closed:
            text = (
                f"{engine.name} holds {len(sim.handles)} handles, waits for {len(sim.awaited)} "
                f"pushes: {stuck} are lost, {closed} were closed before"
            )
            found.append(Finding("blocks are freed", text))
        if crashes := engine.sim.crashes:
            found.append(Finding("the simulator works", f"{engine.name}: {crashes[0]}"))
    return shortened(found)


def _held(proxy: Proxy) -> list[Finding]:
    """Return what one process of the proxy holds."""
    found = [
        Finding(
            "leases end",
            f"{ledger_engine.url} has {ledger_engine.requests} requests and "
            f"{ledger_engine.prompt_bytes} bytes",
        )
        for ledger_engine in proxy.ledger.engines
        if ledger_engine.requests or ledger_engine.prompt_bytes
    ]
    found += [
        Finding("handles end", f"{count} are {state}, the oldest for {oldest:.1f} s")
        for state, (count, oldest) in proxy.custodian.snapshot().items()
        if count
    ]
    if proxy.custodian.orphans.count:
        found.append(Finding("abandoned prefills end", repr(proxy.custodian.orphans)))
    if proxy.admission.inflight or proxy.admission.waiting:
        found.append(Finding("places are given back", repr(proxy.admission)))
    for name, budget in (
        ("bodies", proxy.body_budget),
        ("answers", proxy.answer_budget),
        ("unread", proxy.unread_answers),
    ):
        if held := budget.held:
            found.append(Finding("bytes are given back", f"{name}: {held}"))
    if proxy.connections.open:
        found.append(Finding("connections end", f"{proxy.connections.open} of clients are open"))
    return found


def bodies(engines: Iterable[ChaosEngine]) -> list[Finding]:
    """Every body that an engine gets is JSON, and names KV only where there is some."""
    found = [
        Finding("each body is JSON", f"{one.name}: {defect}")
        for one in engines
        for defect in one.sim.defective
    ]
    return shortened(found)


def met(world: World) -> list[Finding]:
    """Of engines that count as having met, in their present runs, the decode engine has contacted
    the prefill engine.
    """
    by_run = {engine.in_ledger.run_number: engine.url for engine in world.proxy.engines.values()}
    names = {engine.url: engine for engine in world.engines}
    found = []
    pairs = {pair for proxy in world.proxies for pair in proxy.custodian.contacts.pairs}
    for prefill_run, decode_run in pairs:
        if prefill_run in by_run and decode_run in by_run:
            prefill, decode = names[by_run[prefill_run]], names[by_run[decode_run]]
            contacted = decode.sim.engine.contacted
            if contacted is not None and prefill.sim.engine.engine_id not in contacted:
                text = f"{decode.name} has never contacted {prefill.name} in its present run"
                found.append(Finding("engines that have met have moved KV", text))
    return shortened(found)


def logged(errors: Iterable[str]) -> list[Finding]:
    """The proxy logs no error, and no exception goes nowhere: both are defects of the proxy,
    whatever happens outside.
    """
    return shortened([Finding("no error is logged", text) for text in errors])


def ended(tasks: Iterable[str], transports: Iterable[str]) -> list[Finding]:
    """After the end there is no task and no connection."""
    found = [Finding("tasks end", name) for name in tasks]
    found += [Finding("transports end", name) for name in transports]
    return shortened(found)
