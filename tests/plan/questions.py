"""Questions that plans are asked in tests: an H200 with an 8B model."""

from __future__ import annotations

import os

import msgspec

from pdproxy.engine_model.profile import load
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.plan.question import Demand, Drawn, Question
from pdproxy_lab.simulate.shape import Shape

CHUNKS = (512, 2048, 8192)
REQUESTS = int(os.environ.get("PDPROXY_TEST_PLAN_REQUESTS", "200"))
"""Of a simulation. With 800, queues of requests with long answers get longer: `.ci/full` tries
those.
"""


def question(
    slo: str,
    inputs: int = 4000,
    outputs: int = 128,
    demand: Demand | None = None,
    share: float = 0.9,
) -> Question:
    """Return a question about a load of equal lengths, or another one."""
    profile = load("h200-8b")
    return Question(
        demand=demand or Drawn(inputs=Lengths(inputs, inputs), outputs=Lengths(outputs, outputs)),
        slo=parse_slo(slo),
        share=share,
        hardware=profile.hardware,
        shape=Shape(kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size),
        chunks=CHUNKS,
        policies=("least_load",),
    )


def stricter(one: Question, slo: str) -> Question:
    """Return the question with another SLO."""
    return msgspec.structs.replace(one, slo=parse_slo(slo))
