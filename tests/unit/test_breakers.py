"""The breakers: who is excluded, for how long, and what is reported. And that nobody is left without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Node, Role
from pdproxy.scheduling.policy import Ask
from tests.unit.test_ledger import SPECS, SPLIT, URLS, evidence, ledger


def test_the_breaker() -> None:
    """Failures in a row shut an engine out for the cooldown; one good leg forgives."""
    made = ledger()

    def fail(now: float, verdict: Verdict = Verdict.FAILED) -> bool:
        lease = made.assign_alone(Ask("m", 0, now))
        assert lease is not None
        assert lease.node.url == "a1"
        return made.close(lease, verdict, now)

    assert [fail(0), fail(0, Verdict.GOOD), fail(0), fail(0)] == [False, False, False, True]
    other = made.assign_alone(Ask("m", 0, 9.9))
    assert other is not None
    assert other.node.role is Role.DECODE
    assert fail(10) is True, "the first failure after the cooldown shuts it out again"
    assert any("failed 3 times in a row, its breaker is open for 9.0 s" in line for line in made.shortcomings(11))


def split(made: Ledger, now: float) -> Lease:
    """A decode lease on d1, with d2 excluded."""
    pair = made.assign(SPLIT, Ask("m", 1, now), without={"d2"})
    assert pair is not None
    assert pair[Role.DECODE].node.url == "d1"
    return pair[Role.DECODE]


def test_legs_that_fail_while_the_breaker_is_open_change_nothing() -> None:
    """They were sent before it was opened: it is not reported again and not open for longer. After it, one failure is enough."""
    made = ledger()
    d1 = made.nodes[2]
    legs = [split(made, 0) for _ in range(6)]
    reported = [made.close(legs.pop(), Verdict.FAILED, now) for now in (1, 2, 2, 5, 11.9)]
    assert reported == [False, True, False, False, False]
    assert (d1.usable(11.9), d1.usable(12)) == (False, True)
    assert made.close(legs.pop(), Verdict.FAILED, 12) is True
    assert (d1.usable(21.9), d1.usable(22)) == (False, True)


def test_a_good_leg_closes_the_breaker_only_after_the_cooldown() -> None:
    """A leg that was sent before it opened may still end well: the cooldown stays, but the count begins again."""
    made = ledger()
    d1 = made.nodes[2]
    legs = [split(made, 0) for _ in range(5)]
    assert [made.close(legs.pop(), Verdict.FAILED, 0) for _ in range(2)] == [False, True]
    made.close(legs.pop(), Verdict.GOOD, 9.9)
    assert (d1.usable(9.9), d1.open_until, d1.failures) == (False, 10, 0)
    made.close(legs.pop(), Verdict.GOOD, 10)
    assert (d1.usable(10), d1.open_until) == (True, 0)
    assert made.close(legs.pop(), Verdict.FAILED, 10) is False


def test_after_a_breaker_is_closed_engines_are_chosen_the_short_way_again() -> None:
    """Ranking all engines takes several times as long: only a breaker that was opened makes it necessary."""
    ranked: list[int] = []

    class Watched(LeastLoad):
        def rank(self, ask: Ask, nodes: Sequence[Node]) -> list[Node]:
            ranked.append(len(nodes))
            return super().rank(ask, nodes)

    made = Ledger(
        SPECS, breaker_failures=2, breaker_cooldown=10, policies={Role.PREFILL: lambda made_for: Watched(made_for.role)}
    )
    for url in URLS:
        made.mark_up(url, evidence())

    def ranks(now: float) -> bool:
        ranked.clear()
        assert made.assign(SPLIT, Ask("m", 1, now)) is not None
        return bool(ranked)

    legs = [split(made, 0) for _ in range(4)]
    assert not ranks(0)
    for _ in range(2):
        made.close(legs.pop(), Verdict.FAILED, 0)
    assert ranks(1)
    assert ranks(10), "nothing has shown yet that the engine is well"
    made.close(legs.pop(), Verdict.GOOD, 9)
    assert ranks(10)
    made.close(legs.pop(), Verdict.GOOD, 10)
    assert not ranks(10)


def test_the_breaker_of_an_engine_that_is_down_is_not_reported() -> None:
    """It is out of use already, and has a new start when it is up again."""
    made = ledger()
    d1 = made.nodes[2]
    legs = [split(made, 0) for _ in range(7)]
    assert [made.close(legs.pop(), Verdict.UNREACHABLE, 0) for _ in range(2)] == [True, False]
    assert [made.close(legs.pop(), Verdict.FAILED, 0) for _ in range(3)] == [False] * 3
    made.mark_up("d1", evidence())
    assert d1.usable(0)
    assert [made.close(legs.pop(), Verdict.FAILED, 0) for _ in range(2)] == [False, True]
    made.mark_down("d1", "gone", 1)
    made.mark_up("d1", evidence())
    assert (d1.usable(1), d1.failures) == (True, 0)


def test_the_breaker_never_takes_the_last_engine() -> None:
    """Where all engines of a role, or of a model, are shut out, they are still used, and the pool stays ready."""
    made = ledger()
    made.mark_up("d1", evidence(models="x"))
    made.mark_down("a1", "gone", 0)

    def shut_out(url: str) -> None:
        for _ in range(2):
            lease = made.assign_alone(Ask("x" if url == "d1" else "m", 0, 0))
            assert lease is not None
            assert lease.node.url == url
            made.close(lease, Verdict.FAILED, 0)

    shut_out("d1")
    only = made.assign_alone(Ask("x", 0, 1))
    assert only is not None
    assert only.node.url == "d1", "d2 would only say that it does not know the model"
    shut_out("d2")
    assert not any(node.usable(1) for node in made.nodes if node.role is Role.DECODE)
    pair = made.assign(SPLIT, Ask("m", 1, 1))
    assert pair is not None
    assert pair[Role.DECODE].node.url == "d2"
    assert made.not_ready() is None
    for url in ("d1", "d2"):
        made.mark_down(url, "gone", 1)
    assert made.assign(SPLIT, Ask("m", 1, 1)) is None, "an engine that is down is no engine"
    assert "d1 gone; d2 gone; a1 gone" in (made.not_ready() or "")
