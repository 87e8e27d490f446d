"""A run as JSON: the keys of vLLM's serving benchmark (`vllm bench serve --save-result`, 0.26 to
0.32), and ours below `pdproxy`.

Source: vllm/benchmarks/serve.py. Times that end in `_ms` are milliseconds, others seconds. What was
not measured is null.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pdproxy_lab.bench.client import Target
from pdproxy_lab.bench.measures import PERCENTILES, Spread, Summary
from pdproxy_lab.bench.outcome import Observed
from pdproxy_lab.bench.slo import BenchSlo, listed

Record = dict[str, Any]
MEASURES = ("ttft", "tpot", "itl", "e2el")
"""As vLLM names them."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, as the record names it."""

    endpoint: str
    arrivals: str
    rate: float | None
    """Requests per second on average; None: a trace's own times."""
    burstiness: float
    seed: int
    salt: str
    requests: int
    trace: str | None = None
    left_out: int = 0
    """Requests of the trace that were left out, for their length."""


def record_of(
    summary: Summary, target: Target, shape: Shape, slos: Sequence[BenchSlo], version: str
) -> Record:
    """Return the record of one run."""
    slos = listed(slos)
    measures, ours = _measures(summary, slos)
    general = [slo for slo in slos if slo.of is None]
    record: Record = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if shape.endpoint == "chat" else "openai",
        "backend": "openai-chat" if shape.endpoint == "chat" else "openai",
        "label": target.name,
        "model_id": target.model,
        "tokenizer_id": None,
        "num_prompts": shape.requests,
        "request_rate": shape.rate,
        "burstiness": shape.burstiness,
        "max_concurrency": None,
        **measures,
        "max_concurrent_requests": summary.most_in_flight,
        "rtfx": 0.0,
    }
    record["pdproxy"] = {
        "version": version,
        "name": target.name,
        "url": target.url,
        "times_from": "due",
        "partial": summary.partial,
        **{
            name: getattr(shape, name)
            for name in ("endpoint", "arrivals", "seed", "salt", "trace", "left_out")
        },
        "lag_ms": {
            name: value * 1000 for name, value in msgspec.structs.asdict(summary.lag).items()
        },
        **ours,
        "classes": {name: _part(part, general) for name, part in summary.classes.items()},
        "decisions": {name: _part(part, slos) for name, part in summary.decisions.items()},
    }
    return record


def _part(summary: Summary, slos: Sequence[BenchSlo]) -> Record:
    """Return the record of some of a run's requests, with the keys of a run's record."""
    measures, ours = _measures(summary, slos)
    return {**measures, "pdproxy": ours}


def _measures(summary: Summary, slos: Sequence[BenchSlo]) -> tuple[Record, Record]:
    """Return what was measured, with vLLM's keys and with ours."""
    seconds = summary.seconds
    usable = "run" not in summary.refused
    first = next((summary.good.get(slo.name) for slo in slos if slo.of is None), None)
    both = summary.input_tokens, summary.output_tokens
    total = both[0] + both[1] if both[0] is not None and both[1] is not None else None

    def per_s(count: int | None) -> float | None:
        return count / seconds if usable and count is not None and seconds else None

    measures: Record = {
        "duration": seconds,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": per_s(summary.completed),
        "request_goodput": per_s(first),
        "output_throughput": per_s(summary.output_tokens),
        "total_token_throughput": per_s(total),
        "max_output_tokens_per_s": summary.peak_tokens_per_s if usable else None,
    }
    for name, spread in zip(
        MEASURES, (summary.ttft, summary.tpot, summary.itl, summary.e2e), strict=True
    ):
        measures |= _spread(name, spread)
    return measures, {
        "requests": summary.requests,
        "cut": summary.cut,
        "short": summary.short,
        "asked_input_tokens": summary.asked_input_tokens,
        "cached_tokens": summary.cached_tokens,
        "cached_share": _share(summary.cached_tokens, summary.input_tokens),
        "errors": summary.errors,
        "error_texts": summary.error_texts,
        **_spread("gap", summary.gap),
        **_spread("ttft_from_sent", summary.ttft_from_sent),
        "ttft_over_prediction": summary.ttft_over_prediction,
        "slos": [
            {
                **{
                    key: value
                    for key, value in msgspec.structs.asdict(slo).items()
                    if value is not None
                },
                "good": summary.good.get(slo.name),
                "goodput": per_s(summary.good.get(slo.name)),
                "share": _share(summary.good.get(slo.name), summary.judged.get(slo.name)),
            }
            for slo in slos
        ],
        "not_measured": summary.refused,
        "remarks": summary.remarks,
    }


def detailed(record: Record, seen: Observed) -> Record:
    """Return a record with what vLLM's `--save-detailed` adds: lists with a value per request. What
    vLLM does not have is below `pdproxy` and `detailed`. Texts of answers are not kept.
    """
    outcomes = seen.outcomes
    ours = {
        "classes": [o.class_name for o in outcomes],
        "decisions": [o.decision for o in outcomes],
        "cached_tokens": [o.cached_tokens for o in outcomes],
    }
    return record | {
        "pdproxy": record["pdproxy"] | {"detailed": ours},
        "input_lens": [
            o.prompt_tokens if o.prompt_tokens is not None else o.asked_input for o in outcomes
        ],
        "output_lens": [(o.output_tokens or 0) if o.error is None else 0 for o in outcomes],
        "ttfts": [o.ttft or 0.0 for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "latencies": [o.e2e or 0.0 for o in outcomes],
        "start_times": [o.due for o in outcomes],
        "queue_times": [0.0] * len(outcomes),
        "errors": ["" if o.error is None else f"{o.error}: {o.text}" for o in outcomes],
    }


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _spread(name: str, spread: Spread | None) -> Record:
    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1000

    middle = None if spread is None else spread.percentiles[50]
    return {
        f"mean_{name}_ms": None if spread is None else ms(spread.mean),
        f"median_{name}_ms": ms(middle),
        f"std_{name}_ms": None if spread is None else ms(spread.std),
        **{
            f"p{p}_{name}_ms": None if spread is None else ms(spread.percentiles[p])
            for p in PERCENTILES
            if p != 50
        },
        **(
            {f"max_{name}_ms": ms(spread.largest) if spread is not None else None}
            if name == "gap"
            else {}
        ),
    }
