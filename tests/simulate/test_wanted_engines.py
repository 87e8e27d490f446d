"""As many engines as the proxy says that a load needs keep its objective, and one less does not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.ledger import LedgerOptions
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.slo import Slo
from pdproxy.scheduling.wanted_engines import EngineSize, WantedEngines
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import summarise
from tests.simulate.loads import LEAST_LOAD

HARDWARE = load("h200-8b").hardware
SECONDS = 100.0
TPOT = 0.010


class Looked(Cluster):
    """Asks at the end of a load how many engines it needs."""

    def __init__(self, fleet: Fleet) -> None:
        shape = Shape(max_num_seqs=256, kv_tokens=400_000, enable_prefix_caching=False)
        size = EngineSize(
            times=WorkTimes(HARDWARE, shape.max_num_batched_tokens),
            max_num_seqs=shape.max_num_seqs,
            kv_tokens=shape.kv_tokens,
        )
        self.wanted = WantedEngines(lambda _: size, Slo(tpot=TPOT))
        super().__init__(fleet, HARDWARE, dict.fromkeys(Role, shape), LEAST_LOAD)
        self.needed: dict[Role, float] = {}
        self._at(SECONDS, self._look, None)

    def ledger_options(self, **more: Any) -> LedgerOptions:
        return replace(super().ledger_options(**more), wanted=self.wanted)

    def _look(self, _: object, now: float) -> None:
        found = self.wanted.needed(now)
        self.needed = {role: one.engines for role, one in found.items()}


def calls(rate: float, prompt: int, output: int) -> Iterator[Call]:
    chance, due, number = random.Random(1), 0.0, 0
    while (due := due + chance.expovariate(rate)) < SECONDS:
        tokens, answer = (round(mean * chance.uniform(0.5, 1.5)) for mean in (prompt, output))
        yield Call(number, due, tokens, answer)
        number += 1


def tpot(cluster: Cluster) -> float:
    found = summarise(cluster, ()).tpot
    assert found is not None
    return found.mean


@pytest.mark.parametrize("load", [(24.0, 1000, 400), (12.0, 4000, 300)])
def test_as_many_engines_as_are_needed(load: tuple[float, int, int]) -> None:
    many = Looked(Fleet(prefill=4, decode=6))
    many.run(calls(*load))
    decode = math.ceil(many.needed[Role.DECODE])
    prefill = math.ceil(many.needed[Role.PREFILL])
    assert 2 <= decode < 6
    enough = Looked(Fleet(prefill=prefill, decode=decode))
    enough.run(calls(*load))
    assert tpot(many) < tpot(enough) < TPOT
    assert enough.needed == pytest.approx(many.needed, rel=0.15)
    fewer = Looked(Fleet(prefill=prefill, decode=decode - 1))
    fewer.run(calls(*load))
    assert tpot(fewer) > TPOT
    assert fewer.needed[Role.DECODE] > decode - 1
    # prefill engines lack nothing
    assert fewer.needed[Role.PREFILL] == pytest.approx(many.needed[Role.PREFILL], rel=0.15)
