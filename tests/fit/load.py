"""One row's load on two virtual engines: arrivals from a seed, the proxy's choice, each token's
time.

A small stand-in for the proxy: least requests first, equal engines take turns, as
`scheduling.least_load` has it for engines that serve a request whole. Times are in seconds of
virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pdproxy.engine_model.profile import Profile
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.request import EngineOutput, EngineRequest, SamplingParams
from pdproxy_lab.sim.virtual import VirtualCluster, VirtualEngine
from tests.fit.measured import Load, Row

_MAX_PREFILL_LEGS = 2
"""With so many legs on the prefill engine, `hybrid` serves a request whole on the decode engine."""
_EVERYTHING = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(slots=True)
class Request:
    """One request: when it was sent, and when the client saw its tokens."""

    sent: float
    tokens: list[float] = field(default_factory=list)


def arrivals(rate: float, seconds: float, chance: random.Random) -> list[float]:
    """Return Poisson arrivals, stretched so that the last one is at the end, as vLLM's serving
    benchmark does.
    """
    times = list(accumulate(chance.expovariate(rate) for _ in range(max(round(rate * seconds), 1))))
    return [time * seconds / times[-1] for time in times]


def served(row: Row, load: Load, profile: Profile, seed: int) -> tuple[list[Request], float]:
    """Return the requests of one run, and the seconds from its begin to its last token."""
    run = _Run(row, load, profile, seed)
    run.warm_up()
    begin = run.cluster.now
    due = arrivals(row.rate, load.seconds, random.Random(seed))
    made = [run.arrive(begin + time) for time in due]
    run.cluster.run()
    return made, max(one.tokens[-1] for one in made) - begin


class _Run:
    def __init__(self, row: Row, load: Load, profile: Profile, seed: int) -> None:
        self.cluster = VirtualCluster(chance=seed)
        self._row, self._load, self._hardware = row, load, profile.hardware
        self._count = self._turn = 0
        self._prefilling = 0
        options = profile.options()
        if row.max_num_batched_tokens is not None:
            options["max_num_batched_tokens"] = row.max_num_batched_tokens
        facts = SimFacts(enable_prefix_caching=False, eos_every=0, **options)
        self._engines = [self.cluster.add(facts) for _ in range(row.engines)]
        self._requests = [0] * row.engines

    def warm_up(self) -> None:
        """Let the engines know each other, as they do after a run's first request."""
        self.arrive(0.0)
        self.cluster.run()

    def arrive(self, time: float) -> Request:
        """Have a request sent at a time."""
        one = Request(time)
        self.cluster.at(time + self._hardware.before_engine_s, lambda: self._dispatch(one))
        return one

    def _dispatch(self, one: Request) -> None:
        match self._row.way:
            case "plain":
                self._whole(one, self._least())
            case "hybrid" if self._prefilling >= _MAX_PREFILL_LEGS:
                self._whole(one, 1)
            case _:
                self._split(one)

    def _least(self) -> int:
        count = len(self._engines)
        self._turn = (self._turn + 1) % count
        turns = [(self._turn + number) % count for number in range(count)]
        return min(turns, key=self._requests.__getitem__)

    def _whole(
        self, one: Request, at: int, params: dict[str, Any] | None = None, prompt: Any = None
    ) -> None:
        self._requests[at] += 1

        def seen(output: EngineOutput, now: float) -> None:
            one.tokens += [now + self._hardware.to_client_s] * len(output.tokens)
            if output.finish_reason is not None:
                assert output.finish_reason == "length"
                self._requests[at] -= 1

        self._submit(
            self._engines[at], prompt or self._prompt(), self._load.output_tokens, params, seen
        )

    def _split(self, one: Request) -> None:
        self._prefilling += 1
        prompt = self._prompt()

        def prefilled(output: EngineOutput, now: float) -> None:
            self._prefilling -= 1
            handle = output.kv_transfer_params
            assert handle is not None
            self.cluster.at(
                now + self._hardware.between_engines_s, lambda: self._whole(one, 1, handle, prompt)
            )

        self._submit(self._engines[0], prompt, 1, _EVERYTHING, prefilled)

    def _prompt(self) -> tuple[int, ...]:
        return (self._count % 50_000,) * self._load.prompt_tokens

    def _submit(
        self,
        engine: VirtualEngine,
        prompt: tuple[int, ...],
        max_tokens: int,
        params: dict[str, Any] | None,
        listener: Callable[[EngineOutput, float], None],
    ) -> None:
        self._count += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = EngineRequest(
            id=f"r{self._count}", prompt=prompt, sampling=sampling, kv_transfer_params=params
        )
        self.cluster.submit(engine, request, listener)
