"""What a plan is asked for: a load at any rate, an SLO, and what an engine is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from pdproxy.engine_model.fitted import FittedRanges
from pdproxy.engine_model.hardware import Hardware, attended
from pdproxy_lab.bench.arrivals import Arrivals, Kind
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.bench.trace import TraceEntry
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.simulate.cluster import Call
from pdproxy_lab.simulate.load import Synthetic, TraceReplay
from pdproxy_lab.simulate.shape import Shape

SAMPLE = 6000
"""Requests from which a load is known."""
_WAIT_S = 2.0


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Unique prompts with lengths from ranges. At another rate a seed has the same requests, nearer
    together or further apart.
    """

    inputs: Lengths
    outputs: Lengths
    kind: Kind = "poisson"
    burstiness: float = 0.25

    random = True
    """Whether seeds differ."""

    def calls(self, rate: float, requests: int, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due. `rate`: per second."""
        arrivals = Arrivals(kind=self.kind, rate=rate, burstiness=self.burstiness)
        return Synthetic(
            arrivals=arrivals, inputs=self.inputs, outputs=self.outputs, requests=requests
        ).calls(seed)


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """A trace's requests. Without `kind` its own times are stretched to the rate, and a seed begins
    elsewhere in the trace: 0 to 2 at its thirds, others in their middle.
    """

    entries: Sequence[TraceEntry]
    kind: Kind | None = None
    burstiness: float = 0.25

    @property
    def random(self) -> bool:
        """Whether seeds differ."""
        return self.kind is not None

    def __post_init__(self) -> None:
        """Refuse a trace without times."""
        if self.kind is None and self._own_rate(self.entries) is None:
            raise ValueError("all requests of the trace have the same time: give --arrivals")

    @property
    def rate(self) -> float | None:
        """The trace's own requests per second; None: all have the same time."""
        return self._own_rate(self.entries)

    @staticmethod
    def _own_rate(entries: Sequence[TraceEntry]) -> float | None:
        time = entries[-1].time - entries[0].time
        return (len(entries) - 1) / time if time else None

    def calls(self, rate: float, requests: int, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due. `rate`: per second."""
        if self.kind is not None:
            entries = self.entries[:requests]  # each run looks at all that it is given
            arrivals = Arrivals(kind=self.kind, rate=rate, burstiness=self.burstiness)
            return TraceReplay(entries=entries, arrivals=arrivals, requests=requests).calls(seed)
        entries = self._from((2 * (seed % 3) + (seed > 2)) * len(self.entries) // 6)[:requests]
        own = self._own_rate(entries) or self._own_rate(self.entries) or 1.0
        return TraceReplay(entries=entries, scale=rate / own, requests=requests).calls(seed)

    def _from(self, first: int) -> Sequence[TraceEntry]:
        """Return the whole trace, with the requests before `first` behind the others."""
        entries = self.entries
        if not first:
            return entries
        rate = self._own_rate(entries) or 1.0
        length = entries[-1].time - entries[0].time + 1 / rate
        later = (msgspec.structs.replace(one, time=one.time + length) for one in entries[:first])
        return [*entries[first:], *later]


Demand = Drawn | Traced


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `share`: the part of all requests that must keep the SLO, above 0, at most
    1.
    """

    demand: Demand
    slo: BenchSlo
    share: float
    hardware: Hardware
    shape: Shape
    """An engine; its chunk size is searched."""
    chunks: tuple[int, ...]
    """Ascending."""
    policies: tuple[str, ...]
    objective: BenchSlo | None = None
    """The SLO of which the placement `auto` knows; None: `slo`."""
    max_model_len: int | None = None
    """The most tokens of a request for which the engine was measured; None: not known. Longer ones
    are simulated all the same.
    """
    fitted: FittedRanges | None = None
    """What `hardware` was fitted to; None: not known."""

    def __post_init__(self) -> None:
        """Refuse what has no answer."""
        if not self.hardware.speed:
            raise ValueError("speed must be above 0: with 0 nothing takes time")
        if not self.hardware.step_s(0, 1):
            raise ValueError("a decode step must take time")
        if all(
            limit is None for limit in (self.slo.ttft, self.slo.tpot, self.slo.gap, self.slo.e2e)
        ):
            raise ValueError("the SLO has no limit")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"the share must be above 0 and at most 100 %, got {100 * self.share:g}"
            )
        if not self.chunks or list(self.chunks) != sorted(set(self.chunks)):
            raise ValueError("chunk sizes must ascend")
        if not self.policies:
            raise ValueError("there must be a policy")

    def sample(self, requests: int) -> list[Call]:
        """Return some requests, for what they are on average."""
        return list(islice(self.demand.calls(1.0, requests, 0), requests))


def steady(question: Question) -> Question:
    """Return the question with a limit of TTFT, if the SLO has neither `ttft` nor `e2e`: a queue
    that grows would keep it.

    The limit is 2 s, or twice what the longest prompt takes alone, if that is longer. `auto` is not
    told of it: a proxy would not know it either.
    """
    slo, hardware = question.slo, question.hardware
    if slo.ttft is not None or slo.e2e is not None:
        return question
    longest = max(call.prompt for call in question.sample(SAMPLE))
    alone = longest / hardware.prefill_tokens_per_s + attended(longest, 0) * hardware.attention_s
    limit = max(_WAIT_S, float(math.ceil(2 * alone / hardware.speed)))
    name = f"{slo.name}, and ttft={limit:g}s,"
    return msgspec.structs.replace(
        question, slo=msgspec.structs.replace(slo, name=name, ttft=limit), objective=slo
    )
