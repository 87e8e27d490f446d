"""Rules about a single engine: can it be reached, is it an engine, does it work, is its clock
right? Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts, EngineFacts
from pdproxy.check.findings import Finding

MAX_SKEW = 5.0
"""Seconds. With a larger difference of clocks, logs and `created` of two machines can't be
compared.
"""

_KEY = "set auth.engine_api_key (or PDPROXY_AUTH__ENGINE_API_KEY) to the engine's --api-key"


def down(facts: CheckFacts) -> Iterator[Finding]:
    """An engine that can't be asked."""
    for engine in facts.engines:
        if engine.trouble is None or engine.trouble.kind == "key":
            continue
        match engine.trouble.kind:
            case "unreachable":
                remedy = (
                    "start the engine, or correct its URL; from another machine it needs --host "
                    "0.0.0.0 and an open port"
                )
                if facts.machine.proxies and engine.url not in facts.machine.bypassed:
                    remedy += (
                        "; pdproxy uses no HTTP proxy, so an engine behind one can't be reached"
                    )
            case "tls":
                remedy = (
                    "https:// in its URL if the engine has TLS, else http://; for a certificate "
                    "that is not trusted, tls.ca of"
                    " the pool or of the node names its authorities; one that has expired must "
                    "be renewed"
                )
            case "silent":
                remedy = (
                    "the port accepts connections and nothing answers: if the process hangs or "
                    "is stopped, restart"
                    f" it; if it is only slow, give more than --timeout {facts.timeout:g}"
                )
            case "unhealthy":
                remedy = (
                    "the engine's core has died or is still starting: read its log, and restart it"
                )
            case _:
                remedy = (
                    "this URL must be a vLLM server, http://host:port, with nothing before it "
                    "that changes answers"
                )
        yield Finding(
            level="error",
            code="engine_down",
            where=(engine.url,),
            says=f"{_name(engine)}: {engine.trouble.text}",
            remedy=remedy,
        )


def key(facts: CheckFacts) -> Iterator[Finding]:
    """An engine that refuses the key."""
    has_key = _has_key(facts)
    for engine in facts.engines:
        if engine.trouble is not None and engine.trouble.kind == "key":
            what = (
                "refuses the key that is configured"
                if has_key
                else "requires a key, and none is configured"
            )
            yield Finding(
                level="error",
                code="wrong_key",
                where=(engine.url,),
                says=f"{_name(engine)} {what} ({engine.trouble.text})",
                remedy=f"{_KEY}; for an engine with a key of its own, api_key or api_key_file of "
                f"its node",
            )


def _has_key(facts: CheckFacts) -> bool:
    auth = facts.settings.auth
    given = [auth.engine_api_key, auth.engine_api_key_file]
    return any(
        one is not None
        for engine in facts.settings.pool.nodes
        for one in (*given, engine.api_key, engine.api_key_file)
    )


def clients_key(facts: CheckFacts) -> Iterator[Finding]:
    """An engine key, but no keys of clients: the engine key is not sent for them."""
    auth = facts.settings.auth
    if _has_key(facts) and not auth.api_keys and auth.api_keys_file is None:
        yield Finding(
            level="note",
            code="clients_need_key",
            says="auth.engine_api_key is set and auth.api_keys is empty: clients must send the "
            "engines' key themselves",
            remedy="set auth.api_keys to your clients' keys: then pdproxy checks those and sends "
            "the engines' key itself",
        )


def not_an_engine(facts: CheckFacts) -> Iterator[Finding]:
    """A URL of a proxy, or of a server without vLLM's metrics."""
    for engine in facts.engines:
        metrics = engine.metrics
        if engine.is_proxy:
            yield Finding(
                level="error",
                code="not_an_engine",
                where=(engine.url,),
                says=f"{_name(engine)} is a pdproxy, not an engine",
                remedy="give the URL of the vLLM server itself",
            )
        elif engine.could_be_asked and (metrics is None or not metrics.vllm):
            yield Finding(
                level="warning",
                code="no_metrics",
                where=(engine.url,),
                says=f"{_name(engine)} has no metrics of vLLM: nothing shows whether KV moves",
                remedy="if a router answers here, give the engine's own URL; else start it without "
                "--disable-log-stats",
            )
        elif (
            engine.could_be_asked
            and engine.role in ("decode", "any")
            and not (metrics and metrics.by_source)
        ):
            yield Finding(
                level="warning",
                code="no_metrics",
                where=(engine.url,),
                says=f"{_name(engine)}: its metrics do not show the source of prompt tokens, nor "
                f"whether KV moves",
                remedy="use a vLLM that has vllm:prompt_tokens_by_source_total (0.32.0 has)",
            )


def changed(facts: CheckFacts) -> Iterator[Finding]:
    """An engine that changed during the check."""
    for engine in facts.by_role("encode", "prefill", "decode", "aggregated"):
        if engine.restarted:
            yield Finding(
                level="error",
                code="engine_changed",
                where=(engine.url,),
                says=f"{_name(engine)} was another process at the end of the check than at its "
                f"beginning",
                remedy="it has restarted (see its log), or several engines share this URL: list "
                "each under its own URL",
            )


def no_output(facts: CheckFacts) -> Iterator[Finding]:
    """An engine that is healthy and does not generate."""
    for engine in facts.by_role("encode", "prefill", "decode", "aggregated"):
        if engine.no_output:
            yield Finding(
                level="error",
                code="engine_mute",
                where=(engine.url,),
                says=f"{_name(engine)} reports that it is healthy, but a completion of 8 tokens "
                f"fails: {engine.no_output}",
                remedy="read the engine's log; if its core hangs, restart it",
            )
        elif not engine.base_names:
            yield Finding(
                level="error",
                code="no_model",
                where=(engine.url,),
                says=f"{_name(engine)} lists no model in /v1/models",
                remedy="start it with a model, without a gateway that hides /v1/models",
            )


def clock(facts: CheckFacts) -> Iterator[Finding]:
    """An engine whose clock is wrong."""
    for engine in facts.by_role("encode", "prefill", "decode", "aggregated"):
        if abs(engine.clock_skew) > MAX_SKEW:
            way = "ahead of" if engine.clock_skew > 0 else "behind"
            yield Finding(
                level="warning",
                code="clock",
                where=(engine.url,),
                says=f"{_name(engine)}: its clock is {abs(engine.clock_skew):.0f} s {way} this "
                f"machine's",
                remedy="run NTP on both: logs, metrics and `created` can't be compared otherwise",
            )


def busy(facts: CheckFacts) -> Iterator[Finding]:
    """An engine with other requests: counts may be wrong."""
    for engine in facts.by_role("prefill", "decode"):
        if engine.metrics is not None and engine.metrics.busy:
            count = int(engine.metrics.running + engine.metrics.waiting)
            yield Finding(
                level="note",
                code="busy",
                where=(engine.url,),
                says=f"{_name(engine)} had {count} other requests: its counters include them, so "
                f"numbers may be wrong",
                remedy="for certain results, check engines without other traffic",
            )


def _name(engine: EngineFacts) -> str:
    return f"{engine.role} {engine.url}"


RULES = (down, key, not_an_engine, changed, no_output, clock, busy, clients_key)
