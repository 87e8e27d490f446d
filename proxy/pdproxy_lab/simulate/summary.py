"""What a simulated run amounts to, and its record with the keys of vLLM's serving benchmark, for
`bench --compare`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from pdproxy.engine_model.fitted import Ranges
from pdproxy_lab.bench.measures import PERCENTILES, Spread, spread_of
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.simulate.asked import asked_of
from pdproxy_lab.simulate.cluster import Cluster
from pdproxy_lab.simulate.records import RequestTimes

Record = dict[str, Any]


class RoleUse(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines of a role were used, over the whole run and all of them."""

    engines: int
    busy: float
    """The share of time in which they computed."""
    with_prefill: float
    """The share of time in steps with a part of a prompt."""
    kv_peak: float
    """The largest share of its KV memory that an engine had in use."""
    prompt_tokens: int
    """Computed, not found in a cache."""
    cached_tokens: int
    output_tokens: int
    """Decoded; each request's first token comes from its prompt's last step."""
    preemptions: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies in seconds, from when a request was due. None: nothing to measure."""

    requests: int
    completed: int
    seconds: float
    """From the start to the last token."""
    input_tokens: int
    output_tokens: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    gap: Spread | None
    """The longest gap of each request."""
    e2e: Spread | None
    good: dict[str, int]
    """Good requests by the name of the SLO. A refused request is none."""
    engines: int
    splits: int
    """Requests that got two engines."""
    roles: dict[str, RoleUse]
    asked: Ranges
    """What it has asked of the engines: lengths, and how much they decode at once."""
    events: int

    def per_s(self, count: int) -> float:
        """Return how many per second."""
        return count / self.seconds if self.seconds else 0.0


def summarise(cluster: Cluster, slos: Sequence[BenchSlo]) -> Summary:
    """Return what the run of a cluster amounts to."""
    records = cluster.records
    done = [number for number in range(len(records)) if not math.isnan(records.last[number])]
    seconds = max((records.last[number] for number in done), default=0.0)
    return Summary(
        requests=len(records),
        completed=len(done),
        seconds=seconds,
        input_tokens=sum(records.prompt[number] for number in done),
        output_tokens=sum(records.output[number] for number in done),
        ttft=spread_of([records.first[n] - records.due[n] for n in done]),
        tpot=spread_of([tpot for n in done if (tpot := _tpot(records, n)) is not None]),
        itl=cluster.itl.spread(),
        gap=spread_of([records.worst_gap[n] for n in done if records.output[n] > 1]),
        e2e=spread_of([records.last[n] - records.due[n] for n in done]),
        good={slo.name: sum(kept(slo, records, n) for n in done) for slo in slos},
        engines=len(cluster.engines),
        splits=cluster.splits,
        roles=_roles(cluster, seconds),
        asked=asked_of(cluster),
        events=cluster.events,
    )


def _tpot(records: RequestTimes, number: int) -> float | None:
    tokens = records.output[number]
    return (records.last[number] - records.first[number]) / (tokens - 1) if tokens > 1 else None


def kept(slo: BenchSlo, records: RequestTimes, number: int) -> bool:
    """Return whether a request that has ended was good."""
    due = records.due[number]
    found = (
        (slo.ttft, records.first[number] - due),
        (slo.tpot, _tpot(records, number)),
        (slo.gap, records.worst_gap[number]),
        (slo.e2e, records.last[number] - due),
    )
    return all(limit is None or value is None or value <= limit for limit, value in found)


def _roles(cluster: Cluster, seconds: float) -> dict[str, RoleUse]:
    found = {}
    for role in dict.fromkeys(cluster.roles.values()):
        engines = [engine for url, engine in cluster.engines.items() if cluster.roles[url] is role]
        time = len(engines) * seconds or 1.0
        found[role.value] = RoleUse(
            engines=len(engines),
            busy=sum(engine.busy_s for engine in engines) / time,
            with_prefill=sum(engine.prefill_s for engine in engines) / time,
            kv_peak=max(
                1 - engine.memory.least_available / engine.memory.blocks for engine in engines
            ),
            prompt_tokens=sum(engine.prefill_tokens for engine in engines),
            cached_tokens=sum(engine.cached_tokens for engine in engines),
            output_tokens=sum(engine.decode_tokens for engine in engines),
            preemptions=sum(engine.preemptions for engine in engines),
        )
    return found


def record_of(
    summary: Summary,
    name: str,
    seed: int,
    slos: Sequence[BenchSlo],
    asked: Record,
) -> Record:
    """Return the record of one run. `asked`: what was simulated, as it goes into the record."""
    first = summary.good[slos[0].name] if slos else None
    failed = summary.requests - summary.completed
    record: Record = {
        "backend": "pdproxy-simulate",
        "label": name,
        "num_prompts": summary.requests,
        "duration": summary.seconds,
        "completed": summary.completed,
        "failed": failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.per_s(summary.completed),
        "request_goodput": None if first is None else summary.per_s(first),
        "output_throughput": summary.per_s(summary.output_tokens),
        "total_token_throughput": summary.per_s(summary.input_tokens + summary.output_tokens),
    }
    for key, spread in (
        ("ttft", summary.ttft),
        ("tpot", summary.tpot),
        ("itl", summary.itl),
        ("e2el", summary.e2e),
    ):
        record |= _spread(key, spread)
    record["pdproxy"] = {
        "name": name,
        "simulated": asked,
        "seed": seed,
        "requests": summary.requests,
        "engines": summary.engines,
        "throughput_per_engine": summary.per_s(summary.completed) / summary.engines,
        **_spread("gap", summary.gap),
        "slos": [
            {
                **{
                    key: value
                    for key, value in msgspec.structs.asdict(slo).items()
                    if value is not None
                },
                "good": summary.good[slo.name],
                "goodput": summary.per_s(summary.good[slo.name]),
                "goodput_per_engine": summary.per_s(summary.good[slo.name]) / summary.engines,
                "share": summary.good[slo.name] / summary.requests if summary.requests else None,
            }
            for slo in slos
        ],
        "asked_of_engines": dict(summary.asked.each()),
        "roles": {role: msgspec.structs.asdict(use) for role, use in summary.roles.items()},
        "errors": {"too long for the KV memory": failed} if failed else {},
        "remarks": [
            f"no request went to the {use.engines} {role} engines: a pool with prefill and "
            f"decode engines splits all prompts"
            for role, use in summary.roles.items()
            if not use.busy and summary.completed
        ],
    }
    return record


def _spread(name: str, spread: Spread | None) -> Record:
    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1000

    found = {f"mean_{name}_ms": None if spread is None else ms(spread.mean)}
    for p in PERCENTILES:
        word = "median" if p == 50 else f"p{p}"
        found[f"{word}_{name}_ms"] = None if spread is None else ms(spread.percentiles[p])
    return found
