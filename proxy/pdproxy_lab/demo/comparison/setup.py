"""What is compared: the engines' times, the load and the limits. Pure.

Load and limits are those of the measurements on two H200s (docs/evidence/auto-h200.txt): unique
prompts of 4,000 tokens, 128 out, Poisson arrivals. There, at 4 requests per second and engine,
split engines kept the first of the limits more often, and plain ones the second.
"""

from __future__ import annotations

import msgspec

from pdproxy.engine_model.profile import Profile, load
from pdproxy.settings.engines import Role
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.sim.facts import SimFacts

PROFILE = "h200-8b"
INPUT_TOKENS, OUTPUT_TOKENS = 4000, 128
LIMITS = (
    BenchSlo(name="TTFT ≤ 500 ms, TPOT ≤ 8 ms", ttft=0.5, tpot=0.008),
    BenchSlo(name="TTFT ≤ 500 ms, TPOT ≤ 15 ms", ttft=0.5, tpot=0.015),
)
"""What a request keeps to be in time. The first one at the start."""
LOADS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Requests per second and engine. More would take more than two cores."""
FIRST_LOAD = LOADS.index(4.0)
SLOW = 8.0
"""How many times longer a slow engine's steps take: the proxy excludes engines from 3 times on, by
the mean of half a minute.
"""


def speed(engines: int, share: float) -> float:
    """Return how fast time runs for fleets of so many engines, 1 being real. `share`: of a core
    that this process gets.

    At a quarter, four engines in each fleet take a third of a core, and the event loop that serves
    all of them adds less than a millisecond to their times.
    """
    usual = min(0.25, 1 / engines)
    if share > 0.8:
        return usual
    return usual / 2 if share > 0.5 else usual / 4


def profile(speed: float) -> Profile:
    """Return the engines' profile at a speed."""
    found = load(PROFILE)
    slower = msgspec.structs.replace(found.hardware, speed=speed)
    return msgspec.structs.replace(found, hardware=slower)


def facts(role: Role, model: str, chunk: int, like: Profile) -> SimFacts:
    """Return a simulated engine; `chunk`: its `--max-num-batched-tokens`."""
    options = like.options() | {"max_num_batched_tokens": chunk}
    return SimFacts(role=role, model=model, enable_prompt_tokens_details=True, **options)
