"""What `auto` leaves out of a decision to save time could not have won."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.costs import Costs, Look
from pdproxy.scheduling.auto.loads import PredictedLoad
from pdproxy.scheduling.auto.view import EnginesView
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.placement import Candidates
from pdproxy.scheduling.slo import NO_SLO, Slo
from tests.auto.fleets import ENOUGH, H200, B, Known, ask, ledger

SLOS = (B, NO_SLO, Slo(ttft=2.0, tpot=0.03), Slo(ttft=0.5), Slo(tpot=0.01, gap=0.02), Slo(gap=0.05))
ROLES = (
    [Role.ANY],
    [Role.ANY, Role.PREFILL, Role.DECODE],
    [Role.PREFILL, Role.DECODE],
    [Role.AGGREGATED, Role.ANY],
)


class Thorough(Auto):
    """Computes all choices of the engines that are worth a look, and compares the least with the
    decision.
    """

    compared = others = 0

    def _least(
        self,
        costs: Costs,
        now: float,
        tokens: int,
        output: float,
        known: Mapping[str, int],
        view: EnginesView,
        candidates: Candidates,
        share: float,
    ) -> Any:
        def look(load: PredictedLoad) -> Look:
            one = costs.look(load, now, tokens, known.get(load.url, 0), output, share)
            if not one.tpot_s:
                costs.answer(one, now, tokens, output)
            return one

        turn = view._turn
        cached = view.cached(known) if known else []
        prefills = view.worth_prefill(cached)
        wholes = [
            load for load in (*view.worth_whole(cached), *prefills) if load in view.serve_whole
        ]
        view._turn = turn
        ratio = self._handoffs.by_bits[tokens.bit_length()].ratio
        found = []
        for load in wholes:
            one = look(load)
            cost = costs.whole(one)[0]
            found.append(cost + (one.tpot_cost - one.late * one.slow))
        for prefill in prefills:
            for decode in view.worth_decode():
                if prefill is not decode and candidates.compatible(prefill.engine, decode.engine):
                    found.append(costs.split(look(prefill), look(decode), tokens, ratio).cost)
        first = None
        if prefills and (decodes := view.worth_decode()):
            prefill, decode = prefills[0], decodes[0]
            if prefill is not decode and candidates.compatible(prefill.engine, decode.engine):
                first = costs.split(look(prefill), look(decode), tokens, ratio).cost
        choice, other = super()._least(costs, now, tokens, output, known, view, candidates, share)
        if found:
            assert choice is not None
            if first is not None and choice.option.cost < first:
                assert other is not None
                assert other.option.cost <= first
            if other is not None:
                self.others += 1
                assert other.option.cost >= choice.option.cost
                assert (other.prefill, other.decode) != (choice.prefill, choice.decode)
                assert other.option.cost in found or not (other.decode or other.prefill).tpot_s
            # Where those that are worth a look may not work together, another pair may cost less
            # than all of them.
            assert choice.option.cost == min(found) or (
                choice.decode is not None and choice.option.cost < min(found)
            )
            self.compared += 1
        return choice, other


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from((2, 3, 5, 16)),
    slo=st.sampled_from(SLOS),
    mix=st.sampled_from(ROLES),
)
def test_a_decision_is_the_least_of_all_choices(
    seed: int, count: int, slo: Slo, mix: list[Role]
) -> None:
    chance = random.Random(seed)
    known = Known()
    placement = Thorough(AutoOptions(times_of=lambda _: (H200, 2048), slo=slo, cached=known.cached))
    of = ledger(placement, [*(chance.choice(mix) for _ in range(count)), Role.DECODE])
    urls = [engine.url for engine in of.engines]
    for _ in range(chance.choice((0, 0, count))):
        of.eject(chance.choice(urls), chance.choice(urls))
    waiting: list[tuple[Lease, ...]] = []
    decoding: list[Lease] = []
    now = 0.0
    for _ in range(100):
        now += chance.expovariate(4.0 * count)
        known.tokens = {
            url: chance.randrange(0, 1000, 16) for url in chance.sample(urls, chance.choice((0, 2)))
        }
        if chance.random() < 0.2:
            known.tokens = dict.fromkeys(urls, 512)
        assignment = of.place(
            ask(now, 1000 + int(chance.expovariate(1 / 3000)), waited=ENOUGH),
            split=chance.random() < 0.9,
        )
        if assignment is not None:
            waiting.append(assignment.leases)
        if len(waiting) > count:
            leases = waiting.pop(chance.randrange(len(waiting)))
            if len(leases) > 1:
                of.close(leases[0], Verdict.GOOD, now)
            of.began(leases[-1], now)
            decoding.append(leases[-1])
        if len(decoding) > 4 * count:
            of.close(
                decoding.pop(chance.randrange(count)),
                Verdict.GOOD,
                now,
                chance.choice((None, 1, 128)),
            )
    assert placement.compared


def test_prefill_engines_without_any_that_decodes_are_left_out() -> None:
    of = ledger(
        Thorough(AutoOptions(times_of=lambda _: (H200, 2048), slo=B)),
        [Role.PREFILL, Role.AGGREGATED],
    )
    assignment = of.place(ask(1.0), split=True)
    assert assignment is not None
    assert [lease.engine.url for lease in assignment.leases] == ["http://1:1"]
