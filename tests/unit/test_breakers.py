"""The breakers: who is excluded, for how long, what is reported, and that nobody is left without an
engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask
from tests.unit.test_ledger import SPECS, SPLIT, URLS, evidence, ledger


def test_the_breaker() -> None:
    """Failures in a row shut an engine out for the cooldown; one good leg forgives."""
    made = ledger()

    def fail(now: float, verdict: Verdict = Verdict.FAILED) -> bool:
        lease = made.assign_alone(Ask("m", 0, now))
        assert lease is not None
        assert lease.engine.url == "a1"
        return made.close(lease, verdict, now)

    assert [fail(0), fail(0, Verdict.GOOD), fail(0), fail(0)] == [False, False, False, True]
    other = made.assign_alone(Ask("m", 0, 9.9))
    assert other is not None
    assert other.engine.role is Role.DECODE
    assert fail(10) is True, "the first failure after the cooldown shuts it out again"
    assert any(
        "failed 3 times in a row, its breaker is open for 9.0 s" in line
        for line in made.shortcomings(11)
    )


def split(made: Ledger, now: float) -> Lease:
    """A decode lease on d1, with d2 excluded."""
    pair = made.assign(SPLIT, Ask("m", 1, now), without={"d2"})
    assert pair is not None
    assert pair[Role.DECODE].engine.url == "d1"
    return pair[Role.DECODE]


def test_legs_that_fail_while_the_breaker_is_open_change_nothing() -> None:
    """They were sent before it was opened: it is not reported again and not open for longer. After
    it, one failure is enough.
    """
    made = ledger()
    d1 = made.engines[2]
    legs = [split(made, 0) for _ in range(6)]
    reported = [made.close(legs.pop(), Verdict.FAILED, now) for now in (1, 2, 2, 5, 11.9)]
    assert reported == [False, True, False, False, False]
    assert (d1.usable(11.9), d1.usable(12)) == (False, True)
    assert made.close(legs.pop(), Verdict.FAILED, 12) is True
    assert (d1.usable(21.9), d1.usable(22)) == (False, True)


def test_a_good_leg_closes_the_breaker_only_after_the_cooldown() -> None:
    """A leg that was sent before it opened may still end well: the cooldown stays, but the count
    begins again.
    """
    made = ledger()
    d1 = made.engines[2]
    legs = [split(made, 0) for _ in range(5)]
    assert [made.close(legs.pop(), Verdict.FAILED, 0) for _ in range(2)] == [False, True]
    made.close(legs.pop(), Verdict.GOOD, 9.9)
    assert (d1.usable(9.9), d1.open_until, d1.failures) == (False, 10, 0)
    made.close(legs.pop(), Verdict.GOOD, 10)
    assert (d1.usable(10), d1.open_until) == (True, 0)
    assert made.close(legs.pop(), Verdict.FAILED, 10) is False


def test_after_a_breaker_is_closed_engines_are_chosen_the_short_way_again() -> None:
    """Ranking all engines takes several times as long: only a breaker that was opened makes it
    necessary.
    """
    ranked: list[int] = []

    class Watched(LeastLoad):
        def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
            ranked.append(len(engines))
            return super().rank(ask, engines)

    made = Ledger(
        SPECS,
        LedgerOptions(
            breaker_failures=2,
            breaker_cooldown=10,
            policies={Role.PREFILL: lambda made_for: Watched(made_for.role)},
        ),
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
    d1 = made.engines[2]
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
    """Where all engines of a role, or of a model, are shut out, they are still used, and the pool
    stays ready.
    """
    made = ledger()
    made.mark_up("d1", evidence(models="x"))
    made.mark_down("a1", "gone", 0)

    def shut_out(url: str) -> None:
        for _ in range(2):
            lease = made.assign_alone(Ask("x" if url == "d1" else "m", 0, 0))
            assert lease is not None
            assert lease.engine.url == url
            made.close(lease, Verdict.FAILED, 0)

    shut_out("d1")
    only = made.assign_alone(Ask("x", 0, 1))
    assert only is not None
    assert only.engine.url == "d1", "d2 would only say that it does not know the model"
    shut_out("d2")
    assert not any(engine.usable(1) for engine in made.engines if engine.role is Role.DECODE)
    pair = made.assign(SPLIT, Ask("m", 1, 1))
    assert pair is not None
    assert pair[Role.DECODE].engine.url == "d2"
    assert made.not_ready() is None
    for url in ("d1", "d2"):
        made.mark_down(url, "gone", 1)
    assert made.assign(SPLIT, Ask("m", 1, 1)) is None, "an engine that is down is no engine"
    assert "d1 gone; d2 gone; a1 gone" in (made.not_ready() or "")


# -- half-open, and slow start


def slow(slow_start: float = 8.0) -> tuple[Ledger, LedgerEngine]:
    """A ledger with slow starts, and its engine d1, whose breaker was opened at 0 for ten
    seconds.
    """
    made = Ledger(
        SPECS, LedgerOptions(breaker_failures=2, breaker_cooldown=10, slow_start=slow_start)
    )
    for url in URLS:
        made.mark_up(url, evidence())
    for lease in [split(made, 0) for _ in range(2)]:
        made.close(lease, Verdict.FAILED, 0)
    return made, made.engines[2]


def decodes(made: Ledger, count: int, now: float) -> list[Lease]:
    """The leases of `count` requests on d1, as many as it gets while d2 may have them."""
    found = []
    for _ in range(count):
        pair = made.assign(SPLIT, Ask("m", 1, now))
        assert pair is not None
        if pair[Role.DECODE].engine.url == "d1":
            found.append(pair[Role.DECODE])
    return found


def test_behind_the_cooldown_an_engine_gets_one_request_until_it_was_good() -> None:
    """A thousand requests that all wait for the end of the cooldown would fail all together."""
    made, d1 = slow()
    assert decodes(made, 8, 9.9) == []
    (trial,) = decodes(made, 8, 10)
    assert decodes(made, 8, 11) == []
    assert d1.usable(11)
    assert not d1.takes(11)
    assert any("d1: gets one request at a time" in line for line in made.shortcomings(11))
    made.close(trial, Verdict.NEUTRAL, 12)
    # the client has left: that shows nothing, and another one is next
    (trial,) = decodes(made, 8, 12)
    assert made.close(trial, Verdict.FAILED, 13) is True, "one failure is enough now"
    assert decodes(made, 8, 22.9) == []
    assert len(decodes(made, 8, 23)) == 1


def test_the_first_data_of_a_trial_counts_and_not_its_end() -> None:
    """A stream may take an hour: the engine has shown long before that it serves again."""
    made, d1 = slow()
    (trial,) = decodes(made, 4, 10)
    made.began(trial, 10.5)
    assert len(decodes(made, 8, 11)) == 1, "two places, and the trial still has one"
    made.began(trial, 11)
    made.close(trial, Verdict.GOOD, 11)
    assert d1.trial_places == 2, "one leg counts once"


def test_a_slow_start_doubles_the_places_with_each_good_leg() -> None:
    """And is over in time, whatever happened."""
    made, d1 = slow()
    (trial,) = decodes(made, 4, 10)
    made.close(trial, Verdict.GOOD, 10)
    first = decodes(made, 40, 11)
    assert len(first) == 2
    made.close(first.pop(), Verdict.GOOD, 12)
    assert len(decodes(made, 40, 12)) == 3, "four places, and one of the first two is still open"
    assert not d1.half_open(12)
    assert len(decodes(made, 400, 17.9)) == 0
    assert len(decodes(made, 400, 18)) > 1, "eight seconds behind the good leg all is as before"
    assert (d1.trial_places, d1.slow_until, d1.trials) == (0, 0, 0)


def test_a_slow_start_without_time_closes_the_breaker_at_once() -> None:
    """As with `slow_start` 0, and where there were so many good legs that any number of requests
    will do.
    """
    made, d1 = slow(0.0)
    (trial,) = decodes(made, 4, 10)
    made.close(trial, Verdict.GOOD, 10)
    assert d1.trial_places == 0
    made, d1 = slow(1e9)
    for now in range(10, 20):
        (trial, *_) = decodes(made, 4, now)
        made.close(trial, Verdict.GOOD, now)
    assert d1.trial_places == 0


def test_an_engine_of_a_slow_start_that_fails_is_excluded_again() -> None:
    """By as many failures in a row as ever; what is left of the slow start is no trial of the next
    one.
    """
    made, d1 = slow()
    (trial,) = decodes(made, 4, 10)
    made.close(trial, Verdict.GOOD, 10)
    one, two = decodes(made, 40, 11)
    (three,) = [lease for lease in [split(made, 11)] if lease.trial]
    assert [made.close(lease, Verdict.FAILED, 12) for lease in (one, two)] == [False, True]
    assert len(decodes(made, 8, 22)) == 1, "the third of them runs for long, and takes no place"
    made.close(three, Verdict.GOOD, 22)
    assert d1.trials == 1


def test_the_only_engine_starts_at_once() -> None:
    """A slow start never leaves a request without an engine."""
    made, d1 = slow()
    made.mark_down("d2", "gone", 10)
    assert len(decodes(made, 20, 10)) == 20
    assert d1.trials == 20


def test_releases_pass_half_open_engines_by() -> None:
    """They have no lease, so that nothing would count them; where there is no other engine, they go
    there.
    """
    made, _ = slow()
    engine = made.releasing.through("p1", "m", 10)
    assert engine is not None
    assert engine.url == "d2"
    made.mark_down("d2", "gone", 10)
    engine = made.releasing.through("p1", "m", 10)
    assert engine is not None
    assert engine.url == "d1"


# -- engines that stand still


def test_a_stalled_engine_gets_nothing_until_it_is_let_in() -> None:
    """Not even as the last one: what is sent there waits for nothing. Then one request shows that
    it serves.
    """
    made, d1 = slow()
    made.mark_down("d2", "gone", 0)
    assert made.mark_stalled("d1", "it stands still") is True
    assert made.mark_stalled("d1", "it stands still") is False
    assert made.assign(SPLIT, Ask("m", 1, 30)) is None
    lease = made.assign_alone(Ask("m", 1, 30))
    assert lease is not None
    assert lease.engine.url == "a1"
    made.mark_down("a1", "gone", 30)
    assert made.assign_alone(Ask("m", 1, 30)) is None
    assert "d1 it stands still" in (made.not_ready() or "")
    assert any("d1: it stands still" in line for line in made.shortcomings(30))
    changes: list[None] = []
    made.when_changed(lambda: changes.append(None))
    assert made.let_in("d1", 31) is True
    assert made.let_in("d1", 31) is False
    assert len(changes) == 1, "requests that wait for an engine go on"
    assert made.not_ready() is None
    made.mark_up("d2", evidence())
    (trial,) = decodes(made, 8, 31)
    assert made.close(trial, Verdict.FAILED, 32) is True
    assert not d1.usable(41.9)


def test_a_restart_ends_a_stall() -> None:
    """Another run is another engine; and one that is down is down, and not stalled."""
    made, d1 = slow()
    made.mark_stalled("d1", "it stands still")
    made.mark_up("d1", evidence(started=1.0))
    assert not d1.available
    made.mark_up("d1", evidence(started=2.0))
    assert d1.available
    made.mark_down("d1", "gone", 1)
    assert made.mark_stalled("d1", "it stands still") is False
    assert made.mark_stalled("nobody", "it stands still") is False


def test_failures_of_a_stalled_engine_do_not_open_its_breaker() -> None:
    """All its legs fail at once when it is found to stand still: it is out of use already."""
    made = ledger()
    legs = [split(made, 0) for _ in range(3)]
    made.mark_stalled("d1", "it stands still")
    assert [made.close(leg, Verdict.FAILED, 1) for leg in legs] == [False] * 3
