"""A request that is late anyway waits in the proxy, until it delays nobody."""

from __future__ import annotations

import contextlib

import pytest
from msgspec import structs

from pdproxy.scheduling.decisions import LATE
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.placement import NotYetError
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import NO_SLO, Slo
from tests.auto.fleets import ask, auto, ledger

SLO = Slo(ttft=0.5)


def full(of: Ledger, now: float) -> list[Lease]:
    """Have engines get prompts until one more would be late. Return their leases."""
    leases: list[Lease] = []
    with contextlib.suppress(NotYetError):
        while len(leases) < 100:
            assignment = of.place(ask(now), split=False)
            assert assignment is not None
            leases += assignment.leases
    assert 0 < len(leases) < 100
    return leases


def looked(of: Ledger, first: Ask) -> tuple[float, str]:
    """Have a request placed whenever it is due. Return when it begins, and the reason."""
    asked = first
    while True:
        try:
            assignment = of.place(asked, split=False)
        except NotYetError as later:
            at = later.at
        else:
            assert assignment is not None
            return asked.now - first.now, assignment.reason
        assert asked.now + 0.005 <= at <= asked.now + 0.25
        asked = structs.replace(asked, now=at, waited=at - first.now)


def test_what_is_late_waits_until_an_engine_has_no_prompt() -> None:
    of = ledger(auto(SLO), [Role.AGGREGATED] * 2)
    leases = full(of, 1.0)
    assert {lease.engine.url for lease in leases} == {"http://0:1", "http://1:1"}
    waited, reason = looked(of, ask(1.0))
    # What the engines have is done within the limit; the next prompt comes when that is over.
    assert 0.25 < waited < 0.5
    assert reason == LATE


def test_an_engine_may_be_free_sooner_than_was_predicted() -> None:
    of = ledger(auto(SLO), [Role.AGGREGATED])
    leases = full(of, 1.0)
    for lease in leases:
        of.began(lease, 1.1)
    assert of.place(ask(1.1, waited=0.1), split=False) is not None


def test_what_comes_in_time_goes_before_what_is_late() -> None:
    of = ledger(auto(SLO), [Role.AGGREGATED])
    full(of, 1.0)
    with pytest.raises(NotYetError):
        of.place(ask(1.0), split=False)
    assert of.place(ask(1.0, 100), split=False) is not None
    with pytest.raises(NotYetError):
        of.place(ask(1.1, waited=0.1), split=False)


@pytest.mark.parametrize(("ttft", "most"), [(0.5, 5.0), (20.0, 30.0)])
def test_no_request_waits_for_ever(ttft: float, most: float) -> None:
    """Though engines always have prompts, that never end."""
    of = ledger(auto(Slo(ttft=ttft)), [Role.AGGREGATED])
    for _ in range(500):
        assert of.place(ask(1.0, waited=60.0), split=False) is not None
    waited, reason = looked(of, ask(1.0))
    assert waited == pytest.approx(most, abs=0.01)
    assert reason == LATE


@pytest.mark.parametrize("slo", [NO_SLO, Slo(tpot=0.008), Slo(gap=0.05)])
def test_without_a_limit_of_ttft_nothing_is_late(slo: Slo) -> None:
    of = ledger(auto(slo), [Role.AGGREGATED])
    for _ in range(100):
        assert of.place(ask(1.0), split=False) is not None


def test_what_waits_leaves_nothing_behind() -> None:
    placement = auto(SLO)
    of = ledger(placement, [Role.AGGREGATED])
    for lease in full(of, 1.0):
        of.close(lease, Verdict.NEUTRAL, 2.0)
    assert not placement._legs
    assert [load.expected for load in placement._loads.values()] == [0]


def test_a_split_request_waits_for_the_prefill_engine() -> None:
    of = ledger(auto(Slo(ttft=0.5, tpot=0.004)), [Role.PREFILL, Role.DECODE])
    seen: list[str] = []
    with contextlib.suppress(NotYetError):
        while len(seen) < 100:
            assignment = of.place(ask(1.0), split=True)
            assert assignment is not None
            seen.append(assignment.reason)
    assert "split" in seen
    assert len(seen) < 100
