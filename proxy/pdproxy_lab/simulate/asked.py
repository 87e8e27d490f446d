"""What a simulated run has asked of its engines, in the terms of a profile's ranges. Pure."""

from __future__ import annotations

import math

from pdproxy.engine_model.fitted import Ranges, usual
from pdproxy_lab.simulate.cluster import Cluster


def asked_of(cluster: Cluster) -> Ranges:
    """Return the usual lengths, and the mean sequences and contexts of the engine that has decoded
    most.
    """
    records = cluster.records
    done = [n for n in range(len(records)) if not math.isnan(records.last[n])]
    if not done:
        return Ranges(prompt_tokens=usual(records.prompt))
    seconds = max(records.last[n] for n in done) or 1.0
    decoding = sum(records.last[n] - records.first[n] for n in done)
    tokens = sum(records.output[n] for n in done)
    context = sum(records.prompt[n] + records.output[n] / 2 for n in done) / len(done)
    most = max(engine.decode_tokens for engine in cluster.engines.values())
    sequences = decoding / seconds * most / tokens if tokens else 0.0
    chunks = [
        cluster.shapes[cluster.roles[url]].max_num_batched_tokens
        for url, engine in cluster.engines.items()
        if engine.prefill_tokens
    ]
    return Ranges(
        prompt_tokens=usual(records.prompt[n] for n in done),
        answer_tokens=usual(records.output[n] for n in done),
        sequences=(sequences, sequences),
        context_tokens=(sequences * context, sequences * context),
        chunk=(min(chunks), max(chunks)) if chunks else None,
    )
