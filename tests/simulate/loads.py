"""Hardware, fleets and loads of these tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.shape import Fleet, Shape

H200 = Hardware(
    prefill_tokens_per_s=47_619.0,
    chunk_base_s=0.0021,
    decode_step_s=0.004_327,
    decode_step_per_seq_s=0.000_027,
    weights_read_once=True,
    context_token_s=33.6e-9,
    attention_s=0.97e-9,
    pull_s=0.0098,
    prompt_begin_s=0.0033,
    # equal: whether a pull that begins as another one is posted is a further one depends on
    # rounding
    further_pull_s=0.0098,
    link_bytes_per_s=43_984_000_000.0,
    transfer_latency_s=0.0035,
    transfers_in_line=True,
    request_overhead_s=0.030_123,
    handoff_overhead_s=0.005_017,
    response_overhead_s=0.0046,
)
SIMPLE = Hardware(
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    decode_step_per_seq_s=0.0,
    link_bytes_per_s=131_072e3,
)
"""A prompt's token takes 1 ms, a step that decodes 10 ms, a transfer 1 ms and 1 ms more for each
token.
"""
LEAST_LOAD = {Role.PREFILL: "least_load", Role.DECODE: "least_load"}


def cluster(fleet: Fleet, shape: Shape, hardware: Hardware = H200) -> Cluster:
    return Cluster(fleet, hardware, dict.fromkeys(Role, shape), LEAST_LOAD)


def copies(calls: Sequence[Call]) -> list[Call]:
    return [Call(call.number, call.due, call.prompt, call.output, call.keys) for call in calls]


def drawn(seed: int, count: int, rate: float, longest: int, unit: int) -> list[Call]:
    """Return calls of which many have beginnings in common."""
    chance, due, calls = random.Random(seed), 0.0, []
    for number in range(count):
        due += chance.expovariate(rate)
        prompt = chance.randint(unit, longest)
        units = prompt // unit
        common = chance.randint(0, units)
        branch = 7_000_000 + 100_000 * chance.randrange(3)
        own = range(1000 + number * 1000 + common, 1000 + number * 1000 + units)
        keys = [*range(branch, branch + common), *own]
        calls.append(Call(number, due, prompt, chance.choice((1, 2, 5, 40, 130)), keys))
    return calls


def conversations(seed: int, count: int, step_ms: int = 3000) -> list[dict[str, Any]]:
    """Return lines like those of Mooncake's trace: conversations whose turns repeat what came
    before, times in steps.
    """
    chance, lines, next_id = random.Random(seed), [], 1
    open_ones: list[list[int]] = []
    for number in range(count):
        again = open_ones and chance.random() < 0.5
        ids = open_ones.pop(chance.randrange(len(open_ones))) if again else [0]
        more = chance.randint(1, 14)
        ids = [*ids, *range(next_id, next_id + more)]
        next_id += more
        open_ones.append(ids)
        tokens = (len(ids) - 1) * 512 + chance.randint(1, 511)
        answer = chance.choice((1, 20, 150, 400, 600))
        time = number * 300 // step_ms * step_ms
        lines.append(
            {"timestamp": time, "input_length": tokens, "output_length": answer, "hash_ids": ids}
        )
    return lines


def write_trace(path: Path, count: int = 60) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in conversations(1, count)))
    return path
