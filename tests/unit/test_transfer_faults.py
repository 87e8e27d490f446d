"""Whose fault it is that KV does not move: what pairs show, and how faults are tried again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.scheduling import transfer_faults
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.transfer_faults import TransferFaults
from tests.unit.test_ledger import evidence

SPLIT = (Role.PREFILL, Role.DECODE)


class Pool:
    """Engines of which some pairs move no KV: prompts are sent as a proxy sends them, and tried
    again elsewhere.
    """

    def __init__(self, prefills: int = 2, decodes: int = 2, *, alone: bool = True) -> None:
        specs = [EngineSpec(f"p{n + 1}", Role.PREFILL) for n in range(prefills)]
        specs += [EngineSpec(f"d{n + 1}", Role.DECODE) for n in range(decodes)]
        roles = (Role.AGGREGATED, Role.DECODE) if alone else (Role.AGGREGATED,)
        self.ledger = Ledger(
            specs, LedgerOptions(breaker_failures=3, breaker_cooldown=5, alone=roles)
        )
        for spec in specs:
            self.ledger.mark_up(spec.url, evidence())
        self.now = 0.0
        self.broken: set[tuple[str, str]] = set()
        self.failed: list[tuple[str, str]] = []
        """Pairs that a prompt was sent to first, and where it failed."""

    @property
    def faults(self) -> set[tuple[str, str]]:
        return set(self.ledger.transfers.faults)

    def breaks(self, prefill: str = "", decode: str = "") -> None:
        """Let no KV move any more to or from an engine, or between two."""
        for p in (engine.url for engine in self.ledger.engines if engine.role is Role.PREFILL):
            for d in (engine.url for engine in self.ledger.engines if engine.role is Role.DECODE):
                if prefill in ("", p) and decode in ("", d):
                    self.broken.add((p, d))

    def decoded_alone(self) -> None:
        """Have a decode engine serve a prompt whole."""
        if (got := self.ledger.assign((Role.DECODE,), Ask("m", 10, self.now))) is not None:
            for lease in got.leases:
                self.ledger.close(lease, Verdict.GOOD, self.now)

    def prompt(self) -> tuple[str, str] | None:
        """Send a prompt, once more elsewhere if it fails. Return the pair that served it, None for
        one engine alone.

        What has failed before is counted once it is served.
        """
        failed: list[tuple[str, str]] = []
        times: list[float] = []
        served = self._served(failed, times)
        for number, (pair, at) in enumerate(zip(failed, times, strict=True)):
            self.ledger.transfer_failed(*pair, at, first=not number)
        if served is not None:
            self.ledger.transfer_loaded(*served, self.now)
        return served

    def _served(self, failed: list[tuple[str, str]], times: list[float]) -> tuple[str, str] | None:
        without: tuple[str, ...] = ()
        for attempt in range(2):
            self.now += 0.1
            ask = Ask("m", 10, self.now)
            got = self.ledger.assign(SPLIT, ask, without=without)
            if got is None:
                return None
            p, d = (lease.engine.url for lease in got.leases)
            for lease in got.leases:
                self.ledger.close(lease, Verdict.NEUTRAL, self.now)
            if (p, d) not in self.broken:
                return p, d
            if not attempt:
                self.failed.append((p, d))
            failed.append((p, d))
            times.append(self.now)
            left_out = self.ledger.left_out(p, d, failed)
            without = (left_out,) if left_out == d else (left_out, *self.ledger.other_decodes(d))
        return None


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ({"decode": "d2"}, ("", "d2")),
        ({"prefill": "p2"}, ("p2", "")),
        ({"prefill": "p2", "decode": "d2"}, ("p2", "d2")),
    ],
)
@pytest.mark.parametrize(("prefills", "decodes"), [(2, 2), (3, 4), (2, 7)])
def test_whose_fault_it_is(
    broken: dict[str, str], fault: tuple[str, str], prefills: int, decodes: int
) -> None:
    """It is named, and from then on no prompt fails but the one that tries again."""
    pool = Pool(prefills, decodes)
    pool.breaks(**broken)
    while not pool.faults:
        pool.prompt()
        assert pool.now < 60
    assert pool.faults == {fault}
    pool.failed.clear()
    begun = pool.now
    while pool.now < begun + 50:
        pool.prompt()
    assert len(pool.failed) <= 6, "one prompt tries it, after a longer and longer time"
    (sentence,) = [
        one for one in pool.ledger.shortcomings(pool.now) if all(url in one for url in fault)
    ]
    assert "no prompt is split" in sentence
    pool.broken.clear()
    while pool.faults:
        pool.prompt()
        assert pool.now < begun + 200
    used = {url for _ in range(8 * prefills * decodes) for url in pool.prompt() or ()}
    assert used == {engine.url for engine in pool.ledger.engines}


def test_one_prefill_engine_and_two_decode_engines() -> None:
    for broken, fault in (({"decode": "d2"}, ("", "d2")), ({"prefill": "p1"}, ("p1", ""))):
        pool = Pool(1, 2)
        pool.breaks(**broken)
        for _ in range(20):
            pool.prompt()
        assert pool.faults == {fault}


def test_one_of_each_is_a_link_and_the_decode_engine_serves_alone() -> None:
    """Nobody can tell whose fault it is. No prompt is prefilled in vain, and `/ready` says that
    none is split.
    """
    pool = Pool(1, 1)
    pool.breaks()
    for _ in range(20):
        pool.prompt()
    assert pool.faults == {("p1", "d1")}
    assert len(pool.failed) == 3
    assert pool.ledger.assign(SPLIT, Ask("m", 10, pool.now)) is None
    assert pool.ledger.assign_alone(Ask("m", 10, pool.now)) is not None
    why = pool.ledger.why_degraded(pool.now)
    assert why is not None
    assert pool.ledger.not_ready() is None
    pool.ledger.alone_up_to = 10
    assert pool.ledger.why_degraded(pool.now) == f"{why}, if the pool's setting `alone` allows it"


def test_engines_are_used_where_nobody_can_serve_alone() -> None:
    """The last pair stays in use, and is in full use once KV moves."""
    pool = Pool(1, 1, alone=False)
    pool.breaks()
    for _ in range(20):
        pool.prompt()
    assert pool.faults
    assert pool.ledger.assign(SPLIT, Ask("m", 10, pool.now)) is not None
    pool.broken.clear()
    assert pool.prompt() == ("p1", "d1")
    assert not pool.faults


def test_engines_are_used_where_a_setting_lets_nobody_serve_alone() -> None:
    """A prompt that is too long for a decode engine to serve whole goes to the last pair; a short
    one is served whole.
    """
    pool = Pool(1, 1)
    pool.breaks()
    for _ in range(20):
        pool.prompt()
    pool.ledger.alone_up_to = 10
    assert pool.ledger.assign(SPLIT, Ask("m", 4 * 10, pool.now)) is None
    assert pool.ledger.assign(SPLIT, Ask("m", 4 * 11, pool.now)) is not None


def test_all_pairs_fail_and_come_back() -> None:
    """Then one engine serves each prompt. Few prompts try, and all pairs are used again."""
    pool = Pool(3, 3)
    pool.breaks()
    for _ in range(60):
        pool.prompt()
    assert pool.ledger.why_degraded(pool.now) is not None
    assert len(pool.ledger.transfers.faults) <= 3
    failed, begun = len(pool.failed), pool.now
    while pool.now < begun + 60:
        pool.prompt()
    assert len(pool.failed) - failed <= 3 * 6
    pool.broken.clear()
    begun = pool.now
    while pool.faults:
        pool.prompt()
        assert pool.now < begun + 200


def test_engines_at_work_are_no_proof_for_answers_from_before() -> None:
    """An answer to a prompt that was sent before the failures says nothing of what came behind."""
    faults = TransferFaults(3, 5.0)
    for now in (10.0, 11.0, 12.0):
        assert not faults.loaded("p1", "d1", 9.0)
        faults.failed("p1", "d1", now, more_prefills=False, more_decodes=True)
    assert set(faults.faults) == {("", "d1")}
    assert not faults.loaded("p1", "d1", 11.9)
    assert faults.loaded("p1", "d1", 12.1)
    assert not faults.suspects


def test_failures_between_good_ones_are_no_fault() -> None:
    pool = Pool()
    for _ in range(50):
        pool.ledger.transfer_failed("p1", "d1", pool.now)
        pool.ledger.transfer_failed("p1", "d1", pool.now)
        pool.ledger.transfer_loaded("p1", "d1", pool.now)
    assert not pool.faults
    assert not pool.ledger.transfers.suspects


def test_what_a_fault_explains_is_not_its_partners() -> None:
    """The prefill engines whose KV a broken decode engine could not load have no failures left."""
    pool = Pool(2, 3)
    for prefill in ("p1", "p2", "p1"):
        pool.ledger.transfer_failed(prefill, "d1", 1.0)
    assert pool.faults == {("", "d1")}
    for prefill in ("p1", "p2"):
        pool.ledger.transfer_failed(prefill, "d2", 2.0)
    assert pool.faults == {("", "d1")}


def test_a_prefill_engine_that_gives_no_kv() -> None:
    """It answers, and what it has computed is of no use."""
    pool = Pool()
    assert pool.ledger.kv_not_made("p1", 1.0) is None
    assert pool.ledger.kv_not_made("p1", 1.0) is None
    assert pool.ledger.kv_not_made("p1", 1.0) is not None
    assert pool.faults == {("p1", "")}
    assert pool.ledger.kv_not_made("p1", 2.0) is None, "a prompt that was sent before"
    assert pool.ledger.engines[0].state(2.0) == "kv_failing"


def test_a_decode_engine_that_computes_again() -> None:
    """Its counters show that, and only they show that this is over."""
    pool = Pool()
    assert pool.ledger.transfers_counted("d2", 0, 1000, 1.0) is None, "one prompt's KV may be lost"
    assert pool.ledger.transfers_counted("d2", 0, 0, 6.0) is None
    assert pool.ledger.transfers_counted("d2", 100, 900, 11.0) is not None
    assert pool.faults == {("", "d2")}
    assert {pool.prompt() for _ in range(10)} == {("p1", "d1"), ("p2", "d1")}
    pool.now = 17.0
    tried = [pool.prompt() for _ in range(10)]
    assert sum(pair is not None and pair[1] == "d2" for pair in tried) == 1
    assert pool.faults == {("", "d2")}, "its answer shows nothing"
    assert pool.ledger.transfers_counted("d2", 0, 100, 20.0) is not None
    pool.now = 31.0
    pool.prompt()
    assert pool.ledger.transfers_counted("d2", 100, 0, 35.0) is not None
    assert not pool.faults


def test_half_of_what_two_prefill_engines_send_is_no_fault_of_a_decode_engine() -> None:
    pool = Pool()
    for now in range(20):
        pool.ledger.transfers_counted("d1", 500, 500, now)
    assert not pool.faults


@pytest.mark.parametrize("restarts", [True, False])
def test_an_engine_that_is_removed_or_starts_again_is_forgotten(restarts: bool) -> None:
    pool = Pool(2, 2)
    pool.breaks(decode="d2")
    for _ in range(20):
        pool.prompt()
    assert pool.faults == {("", "d2")}
    over: list[str] = []
    pool.ledger.when_forgiven = lambda fault: over.append(fault.decode)
    if restarts:
        pool.ledger.mark_up("d2", evidence(started=2.0))
    else:
        pool.ledger.remove("d2")
        assert pool.ledger.transfer_failed("p1", "d2", pool.now) is None
        assert pool.ledger.left_out("p1", "d2", [("p1", "d2")]) == "d2"
    assert over == ["d2"]
    assert not pool.ledger.transfers.faults


def test_while_nothing_shows_whose_fault_it_is_the_decode_engine_is_left_out() -> None:
    """The prefill engine has the prompt in its cache."""
    pool = Pool(2, 2)
    for now in range(3):
        assert pool.ledger.left_out("p1", "d1", [("p1", "d1")]) == "d1"
        pool.ledger.transfer_failed("p1", "d1", float(now))


def test_only_what_fails_has_rows() -> None:
    """400 engines make 40,000 pairs: those that fail are bounded, and the others are not known."""
    pool = Pool(200, 200)
    for number in range(20_000):
        p, d = f"p{number % 200 + 1}", f"d{number // 200 + 1}"
        if number % 2:
            pool.ledger.transfer_loaded(p, d, float(number))
        else:
            pool.ledger.transfer_failed(p, d, float(number))
    faults = pool.ledger.transfers
    assert len(faults._links) <= transfer_faults.MAX_LINKS
    assert len(faults.faults) <= transfer_faults.MAX_LINKS


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["failed", "loaded", "not made", "counted", "prompt", "restart"]),
        st.sampled_from(["p1", "p2"]),
        st.sampled_from(["d1", "d2"]),
        st.floats(0, 30),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_any_course_ends_with_all_in_use(events: list[tuple[str, str, str, float]]) -> None:
    """Whatever was noted: some prompt is served, and behind good prompts and counters nothing is
    left.
    """
    pool = Pool()
    for what, p, d, seconds in events:
        pool.now += seconds
        match what:
            case "failed":
                pool.ledger.transfer_failed(p, d, pool.now)
            case "loaded":
                pool.ledger.transfer_loaded(p, d, pool.now)
            case "not made":
                pool.ledger.kv_not_made(p, pool.now)
            case "counted":
                pool.ledger.transfers_counted(d, 0, 10, pool.now)
            case "prompt":
                pool.prompt()
            case "restart":
                pool.ledger.mark_up(d, evidence(started=pool.now + 2))
        assert all(
            fault.until <= pool.now + transfer_faults.LONGEST
            for fault in pool.ledger.transfers.faults.values()
        )
    begun = pool.now
    while pool.faults:
        pool.now += 1
        if round(pool.now) % 3 == 0:
            # else engines take turns in step for ever, and one pair gets no prompt
            pool.decoded_alone()
        pool.prompt()
        for d in ("d1", "d2"):
            pool.ledger.transfers_counted(d, 10, 0, pool.now)
        assert pool.now < begun + 200
    assert not any(engine.transfers is None for engine in pool.ledger.engines)
