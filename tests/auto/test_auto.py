"""The placement `auto` behind the ledger."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.placement import NotYetError
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import NO_SLO, Slo
from tests.auto.fleets import ENOUGH, H200, B, Known, ask, auto, ledger

ANY4 = [Role.ANY] * 4
PAIR = [Role.PREFILL, Role.DECODE]


def placed(of: Ledger, now: float, tokens: int = 4000, *, split: bool = True) -> tuple[Lease, ...]:
    assignment = of.place(ask(now, tokens), split=split)
    assert assignment is not None
    return assignment.leases


def served(of: Ledger, leases: tuple[Lease, ...], now: float, tokens: int = 128) -> None:
    """All of a request at once."""
    if len(leases) > 1:
        of.close(leases[0], Verdict.GOOD, now)
    of.began(leases[-1], now)
    of.close(leases[-1], Verdict.GOOD, now, tokens)


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("slo", [B, NO_SLO])
def test_engines_without_work_take_turns(count: int, slo: Slo) -> None:
    of = ledger(auto(slo), [Role.ANY] * count)
    seen: Counter[str] = Counter()
    for turn in range(20 * count):
        leases = placed(of, 100.0 * turn)
        seen[leases[-1].engine.url] += 1
        served(of, leases, 100.0 * turn + 1)
    assert len(seen) == count
    assert max(seen.values()) <= 20 * 1.5


@pytest.mark.parametrize("count", [3, 16])
def test_requests_at_once_spread_over_the_engines(count: int) -> None:
    of = ledger(auto(Slo(ttft=0.5, tpot=0.05)), [Role.ANY] * count)
    seen = Counter(placed(of, 1.0)[0].engine.url for _ in range(2 * count))
    assert set(seen.values()) == {2}


def test_a_prompts_prefix_attracts_it_until_that_engine_is_busy() -> None:
    known = Known()
    of = ledger(auto(Slo(ttft=0.5, tpot=0.015), cached=known.cached), [Role.ANY] * 8)
    known.tokens = {"http://5:1": 11_900}
    seen = [placed(of, 1.0, 12_000)[0].engine.url for _ in range(64)]
    assert seen[0] == "http://5:1"
    # a hot prefix does not make one engine late while others have nothing to do
    assert len(set(seen)) > 1
    assert Counter(seen)["http://5:1"] > 8


def test_prefixes_of_unknown_engines_mean_nothing() -> None:
    known = Known()
    known.tokens = {"http://gone:1": 4000}
    for count in (2, 16):
        assert placed(ledger(auto(B, cached=known.cached), [Role.ANY] * count), 1.0)


def test_prefill_and_decode_engines_share_the_work_where_decoding_whole_would_be_late() -> None:
    of = ledger(
        auto(Slo(ttft=5.0, tpot=0.006), chunk=8192),
        [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE],
    )
    for _ in range(2):
        for leases in [placed(of, 0.0) for _ in range(8)]:
            if len(leases) > 1:
                of.close(leases[0], Verdict.GOOD, 0.1)
            of.began(leases[-1], 0.1)
    leases = placed(of, 0.2)
    assert [lease.role for lease in leases] == [Role.PREFILL, Role.DECODE]
    assert leases[0].engine is not leases[1].engine


@pytest.mark.parametrize("tokens", [1000, 4000])
def test_a_pull_is_expected_to_take_as_long_as_its_tokens_say(tokens: int) -> None:
    hardware = structs.replace(H200, pull_s=0.001, further_pull_s=0.001, pull_token_s=1e-6)
    placement = auto(Slo(ttft=5.0, tpot=0.006), chunk=8192, hardware=hardware)
    of = ledger(placement, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE])
    expected = [
        leg.pull_s
        for lease in (lease for _ in range(16) for lease in placed(of, 0.0, tokens))
        if lease.role is Role.DECODE
        for _, leg in [placement._legs[lease]]
    ]
    assert expected
    assert expected == pytest.approx([0.001 + 1e-6 * tokens] * len(expected))


def test_what_must_not_be_split_is_not() -> None:
    of = ledger(auto(), PAIR)
    for _ in range(20):
        (lease,) = placed(of, 1.0, 100, split=False)
        assert lease.role is Role.AGGREGATED
        assert lease.engine.role is Role.DECODE


def test_engines_that_do_not_fit_share_no_work() -> None:
    placement = auto(Slo(ttft=10.0))
    of = ledger(placement, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE])
    for prefill, decode in ((0, 2), (0, 3), (1, 2)):
        of.eject(f"http://{prefill}:1", f"http://{decode}:1")
    for _ in range(30):
        leases = placed(of, 1.0)
        if len(leases) > 1:
            assert [lease.engine.url for lease in leases] == ["http://1:1", "http://3:1"]


def test_a_request_that_no_engine_can_begin_in_time_is_refused_if_so_set() -> None:
    for refuses in (False, True):
        of = ledger(auto(Slo(ttft=0.3), refuses=refuses), [Role.AGGREGATED])
        answers = [of.place(ask(1.0, waited=ENOUGH), split=False) for _ in range(20)]
        assert (None in answers) is refuses
        assert answers[0] is not None


def test_a_request_may_have_limits_of_its_own() -> None:
    of = ledger(auto(Slo(ttft=9.0), refuses=True), ANY4)
    assert of.place(ask(1.0, slo=Slo(ttft=1e-3)), split=True) is None
    # the pool's TTFT holds beside its own TPOT
    assert of.place(ask(1.0, slo=Slo(tpot=1e-3)), split=True) is not None
    assert placed(of, 1.0, 2)


def test_clients_that_name_ever_other_limits_take_no_memory() -> None:
    placement = auto(B)
    of = ledger(placement, ANY4)
    for turn in range(200):
        assignment = of.place(ask(float(turn), slo=Slo(ttft=1.0 + turn)), split=True)
        assert assignment is not None
        served(of, assignment.leases, turn + 0.5)
    assert len(placement._costs) <= 64


def test_a_refusal_leaves_nothing_behind() -> None:
    placement = auto(Slo(ttft=0.001), refuses=True)
    of = ledger(placement, ANY4)
    assert all(of.place(ask(1.0), split=True) is None for _ in range(10))
    assert all(load.pending_s == 0 and not load.expected for load in placement._loads.values())


def test_without_a_profile_it_is_least_load_until_it_has_measured() -> None:
    placement = auto(B, assumed=lambda engine: engine.url != "http://3:1")
    of = ledger(placement, ANY4)
    assert placement.status(0.0) == (
        "no profile of http://0:1 and 2 more: until enough of their answers were measured, "
        "requests go to the engines"
        " with the least load"
    )
    seen = Counter(placed(of, 0.0)[0].engine.url for _ in range(8))
    assert set(seen.values()) == {2}
    now = 1.0
    for _ in range(400):
        now += 1.0
        leases = placed(of, now)
        served(of, leases, now + 0.5)
    assert placement.status(0.0) is None


def test_without_a_profile_prompts_are_split_between_the_least_loaded() -> None:
    of = ledger(auto(B, assumed=lambda _: True), [*PAIR, *PAIR])
    pairs = {tuple(lease.engine.url for lease in placed(of, 0.0)) for _ in range(2)}
    assert pairs == {("http://0:1", "http://1:1"), ("http://2:1", "http://3:1")}


def test_decode_engines_without_a_profile_are_known_by_their_steps() -> None:
    placement = auto(B, assumed=lambda _: True)
    of = ledger(placement, PAIR)
    reasons = set()
    for turn in range(60):
        assignment = of.place(ask(10.0 * turn), split=True)
        assert assignment is not None
        reasons.add(assignment.reason)
        if len(assignment.leases) > 1:
            of.close(assignment.leases[0], Verdict.GOOD, 10.0 * turn + 0.1)
        of.began(assignment.leases[-1], 10.0 * turn + 0.2)
        of.close(assignment.leases[-1], Verdict.GOOD, 10.0 * turn + 1.2, 200)
    assert placement.status(0.0) is None
    assert len(reasons) > 1


def test_an_answer_that_comes_as_a_whole_says_nothing_of_prefill_and_decodes_in_the_meantime() -> (
    None
):
    placement = auto(NO_SLO)
    of = ledger(placement, [Role.AGGREGATED])
    for turn in range(40):
        at = 100.0 * turn
        assignment = of.place(ask(at, stream=False), split=False)
        assert assignment is not None
        (load,) = placement._loads.values()
        assert (load.expected, load.decoding) == (1, 0)
        load.advance(at + 5.0)
        assert (load.expected, load.decoding, load.pending_s) == (0, 1, 0.0)
        # a proxy does not report this; nothing is counted twice
        of.began(assignment.leases[0], at + 6.0)
        of.close(assignment.leases[0], Verdict.GOOD, at + 20.0, 500)
        assert (load.expected, load.decoding, load.pending_s) == (0, 0, 0.0)
    assert load.prefill.count == load.step.count == 0
    assert set(placement.state().errors.values()) == {(0.0, 0.0)}
    assert placement.outputs.expected(4000) == pytest.approx(500, rel=0.05)


def test_generic_times_are_corrected_by_what_legs_take() -> None:
    slow = Hardware(prefill_tokens_per_s=10_000.0)
    placement = auto(B, hardware=slow)
    of = ledger(placement, [Role.AGGREGATED])
    now = 0.0
    for _ in range(300):
        now += 1.0
        leases = placed(of, now, split=False)
        of.began(leases[0], now + 0.1)  # 10,000 tokens/s would be 0.4 s
        of.close(leases[0], Verdict.GOOD, now + 0.5, 101)
    (load,) = placement._loads.values()
    assert load.times.prefill_factor == pytest.approx(0.25, rel=0.1)
    assert load.times.step_factor == pytest.approx(0.004 / 0.005, rel=0.1)
    assert placement.state().errors["ttft", "whole"][1] < 0.2


def test_excluded_engines_are_not_chosen_and_are_no_new_engines() -> None:
    placement = auto()
    of = ledger(placement, ANY4)
    for turn in range(200):
        without = {f"http://{turn % 4}:1"}
        assignment = of.place(ask(float(turn)), split=True, without=without)
        assert assignment is not None
        assert not {lease.engine.url for lease in assignment.leases} & without
    assert len(placement._loads) == 4
    assert len(placement._views_by_engines) == 4


def test_models_have_a_demand_of_their_own() -> None:
    """Much work for one model keeps none of the other model's engines for prefill."""
    placement = auto(B, chunk=4096)
    of = ledger(placement, ANY4 * 2)
    for number in range(4):
        of.mark_up(
            f"http://{number}:1",
            Evidence(frozenset({"other", "lora"}), "", 16, (), 0, 1.0, None, frozenset({"lora"})),
        )
    now = 0.0
    for turn in range(2000):
        now += 1 / 18
        leases = placed(of, now)
        if len(leases) > 1:
            of.close(leases[0], Verdict.GOOD, now + 0.02)
        of.began(leases[-1], now + 0.03)
        of.close(leases[-1], Verdict.GOOD, now + 0.04, 128)
        if not turn % 20:
            for model in ("other", "lora"):
                assignment = of.place(Ask(model, 400, now, tokens=100), split=True)
                assert assignment is not None
                served(of, assignment.leases, now)
    assert placement.state().kept > 0
    assert not any(load.kept for url, load in placement._loads.items() if int(url[7]) < 4)
    assert len(placement._groups) == 2


def test_leases_that_others_opened_count() -> None:
    placement = auto()
    of = ledger(placement, [Role.DECODE] * 2)
    lease = of.assign_alone(ask(1.0))
    assert lease is not None
    (other,) = placed(of, 1.0)
    assert other.engine is not lease.engine
    of.began(lease, 2.0)
    of.close(lease, Verdict.GOOD, 3.0, 10)


def test_a_restarted_engine_begins_with_nothing() -> None:
    placement = auto()
    of = ledger(placement, [Role.ANY] * 2)
    old = [placed(of, 1.0, 1000) for _ in range(10)]
    of.remove("http://0:1")
    of.add(EngineSpec("http://0:1", Role.ANY))
    for leases in old:
        for lease in leases:
            of.close(lease, Verdict.NEUTRAL, 2.0)
    of.mark_up("http://0:1", Evidence(frozenset({"m"}), "", 16, (), 0, 9.0))
    placed(of, 3.0)
    loads = placement._loads.values()
    assert sorted(load.expected for load in loads) == [0, 1]
    of.remove("http://0:1")
    assert list(placement._loads) == ["http://1:1"]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from((1, 2, 5, 20)),
    slo=st.sampled_from((B, NO_SLO, Slo(gap=0.05, long_prompt=9000, long_weight=2.5))),
)
def test_nothing_is_left_of_requests_however_they_end(seed: int, count: int, slo: Slo) -> None:
    chance = random.Random(seed)
    placement = auto(slo)
    roles = [
        chance.choice((Role.ANY, Role.PREFILL, Role.DECODE, Role.AGGREGATED)) for _ in range(count)
    ]
    of = ledger(placement, [*roles, Role.DECODE])
    live: list[list[Any]] = []
    now = 0.0
    for _ in range(60):
        now += chance.expovariate(5.0)
        if chance.random() < 0.5:
            tokens, waited = chance.randint(1, 30_000), chance.choice((0.0, 1.0, ENOUGH))
            asked = ask(now, tokens, stream=chance.random() < 0.7, waited=waited)
            with contextlib.suppress(NotYetError):
                assignment = of.place(asked, split=chance.random() < 0.8)
                if assignment is not None:
                    live.append(list(assignment.leases))
        elif live:
            leases = live[chance.randrange(len(live))]
            lease = leases[0]
            if chance.random() < 0.3:
                of.began(leases[-1], now)
            else:
                of.close(lease, chance.choice(list(Verdict)), now, chance.choice((None, 0, 1, 500)))
                leases.remove(lease)
                live = [one for one in live if one]
    for leases in live:
        for lease in leases:
            of.close(lease, Verdict.NEUTRAL, now)
    assert not placement._legs
    for load in placement._loads.values():
        assert (load.expected, load.expected_tokens, load.pulls, load.decoding, load.prompts) == (
            0,
            0,
            0,
            0,
            0,
        )
        assert load.pending_s == load.weight == 0.0
