"""The places of a pool, while engines come and go."""

from __future__ import annotations

from pdproxy.app.capacity import PoolCapacity, ProxyPlaces
from pdproxy.observe.events import Gaps, LegFailed, MemberChanged, RequestEnded
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.settings.limits import Limits
from tests.fakes.registry import registry

A, B, C = "http://a:1", "http://b:1", "http://c:1"
ENDED = RequestEnded("1", "completions", "m", "ok", 200, (), 0.0, None, 1.0, None, None, Gaps())


class Admission:
    """Has the places that it is given."""

    def __init__(self) -> None:
        self.inflight = 0
        self.places: int | None = None
        self.tokens = 0

    def resize(self, places: int | None, tokens: int) -> None:
        self.places, self.tokens = places, tokens


class Pool:
    """Two decode engines that take four requests each."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.engines, self.ledger = registry(*(EngineSpec(url, Role.DECODE) for url in (A, B)))
        self.admission = Admission()
        self.capacity = PoolCapacity(
            limits or Limits(engine_requests=4), self.engines, self.admission
        )
        self.engines.watch(self.capacity)
        for url in (A, B):
            self.ledger.mark_up(url, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
        self.changed()

    def changed(self) -> None:
        self.capacity.notify(MemberChanged(A, "decode", "draining", "settings"))

    def begin(self) -> Lease:
        lease = self.ledger.assign_alone(Ask("m", 1, 0.0), without=[B])
        assert lease is not None
        self.admission.inflight += 1
        return lease

    def end(self, lease: Lease) -> None:
        self.ledger.close(lease, Verdict.GOOD, 1.0)
        self.admission.inflight -= 1
        self.capacity.notify(ENDED)


def test_streams_of_a_draining_engine_take_no_places_of_others() -> None:
    """They may take minutes: meanwhile the others serve as many as they can, and never more."""
    pool = Pool()
    leases = [pool.begin() for _ in range(4)]
    assert pool.admission.places == 8
    pool.ledger.mark_draining(A, "is being drained")
    pool.changed()
    assert pool.admission.places == 8, "4 are left, 4 may come to the other one"
    pool.end(leases.pop())
    assert pool.admission.places == 7
    pool.engines.remove(A)
    assert pool.admission.places == 7, "legs to it go on"
    for lease in leases:
        pool.end(lease)
    assert pool.admission.places == 4


def test_tokens_per_engine_follow_the_engines() -> None:
    """One that drains counts as long as its requests run."""
    pool = Pool(Limits(engine_tokens=1000))
    lease = pool.begin()
    assert pool.admission.places is None
    assert pool.admission.tokens == 2000
    pool.ledger.mark_draining(A, "is being drained")
    pool.changed()
    assert pool.admission.tokens == 2000
    pool.end(lease)
    assert pool.admission.tokens == 1000
    pool.capacity.notify(LegFailed("1", B, "decode", "refused", will_retry=True, status=503))
    assert pool.admission.places is None, "nothing is learned unless a setting says so"
    pool.engines.remove(B)
    assert pool.admission.tokens == 1000, (
        "a request that comes now is refused because there is no engine"
    )


def test_a_replaced_engine_is_the_same_machine() -> None:
    """What it still has fills its window."""
    pool = Pool()
    for _ in range(4):
        pool.begin()
    pool.engines.remove(A)
    pool.engines.add(EngineSpec(A, Role.DECODE), pool.engines[B].client)
    pool.ledger.mark_up(A, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
    pool.changed()
    assert pool.admission.places == 8


def test_the_places_of_several_pools() -> None:
    """As many as all together can take; a pool without a bound leaves none for all."""
    admission = Admission()
    shared = ProxyPlaces(admission)  # type: ignore[arg-type]
    both = (EngineSpec(A, Role.DECODE),), (EngineSpec(B, Role.DECODE), EngineSpec(C, Role.PREFILL))
    pools = [registry(*specs) for specs in both]
    for (_, ledger), specs in zip(pools, both, strict=True):
        for spec in specs:
            ledger.mark_up(spec.url, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
    first, second = (shared.of(engines) for engines, _ in pools)
    first.resize(4, 10)
    assert admission.places is None
    second.resize(3, 20)
    assert admission.places == 7
    assert admission.tokens == 30
    first.resize(None, 0)
    assert admission.places is None
    for engines, _ in pools:
        for engine in engines.values():
            engine.in_ledger.requests = 5
    assert [first.inflight, second.inflight] == [5, 5], (
        "a prompt that is being prefilled has a decode engine, too"
    )


def test_a_pool_that_goes_down_leaves_the_others_their_bound() -> None:
    """It takes no more than it has. Without any pool there is no bound: nobody waits for an engine
    that is not there.
    """
    admission = Admission()
    shared = ProxyPlaces(admission)  # type: ignore[arg-type]
    pools = [
        registry(EngineSpec(url, Role.DECODE), EngineSpec(f"{url}2", Role.PREFILL))
        for url in (A, B)
    ]
    capacities = [
        PoolCapacity(Limits(engine_requests=4), engines, shared.of(engines)) for engines, _ in pools
    ]
    ledgers = [ledger for _, ledger in pools]

    def changed() -> int | None:
        for one in capacities:
            one.notify(MemberChanged(A, "decode", "added", "settings"))
        return admission.places

    assert changed() is None
    for url, ledger in zip((A, B), ledgers, strict=True):
        for own in (url, f"{url}2"):
            ledger.mark_up(own, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
    assert changed() == 8
    ledgers[1].mark_down(B, "connection refused", 1.0)
    assert changed() == 4
    pools[1][0][B].in_ledger.requests = 3
    assert changed() == 7
    ledgers[0].mark_down(A, "connection refused", 1.0)
    assert changed() is None


def test_another_number_is_used_at_once() -> None:
    """Also one that is learned from now on, which has no bound at first."""
    pool = Pool()
    assert pool.admission.places == 8
    pool.capacity._limits = Limits(engine_requests=2)
    pool.capacity.configure()
    assert pool.admission.places == 4
    pool.capacity._limits = Limits(engine_requests="auto")
    pool.capacity.configure()
    assert pool.admission.places is None
