"""Membership: who wants an engine, how it drains, and what a source may do."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest

from pdproxy.fleet import membership
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.member import MembershipError, MemberState
from pdproxy.fleet.membership import Membership
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, MemberChanged, NodeChanged, Observers
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.kv.stuck import StuckKv
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import PushedToDecode
from tests.fakes.clock import later_turns
from tests.fakes.recorder import Recorder
from tests.fakes.registry import unused_client
from tests.fakes.world import until

A, B, C = (ConfiguredEngine(url=f"http://{name}:8000", role="decode") for name in "abc")
EVIDENCE = Evidence(frozenset("m"), "1", 16, (), 0, 1.0)


class Setup:
    """Adds engines to a registry, but for those in `broken`."""

    def __init__(self, engines: EngineRegistry) -> None:
        self.engines = engines
        self.broken: set[str] = set()
        self.capacity: int | None = None

    def checked(self, engine: ConfiguredEngine) -> ConfiguredEngine:
        return engine

    def checked_all(self, engines: Sequence[ConfiguredEngine]) -> list[ConfiguredEngine]:
        return list(engines)

    def add(self, engine: ConfiguredEngine, *, is_checked: bool = False) -> Engine:
        if engine.url in self.broken:
            raise SettingsError("its key can't be read")
        return self.engines.add(
            EngineSpec(engine.url, Role(engine.role)),
            unused_client(engine.url),
            buffer_capacity=self.capacity,
        )

    def remove(self, url: str) -> Engine:
        return self.engines.remove(url)


class Leg:
    """A leg that ends when it is told to."""

    phase, since, prompt_bytes, stalled_before, waits_for = "decode", 0.0, 0, 0, None
    in_silence, must_progress, is_counted = False, True, True

    def __init__(self, end: Callable[[], None]) -> None:
        self.errors: list[EngineError] = []
        self._end = end

    def last_sign(self) -> float:
        return 0.0

    def source_lost(self, why: str) -> None:
        raise AssertionError

    def fail(self, error: EngineError) -> None:
        self.errors.append(error)
        self._end()


class World(Recorder):
    """A pool of which nothing is probed unless a test says so."""

    def __init__(self) -> None:
        self.time = 100.0
        super().__init__()
        self.left: list[str] = []
        self.forgotten: list[str] = []
        self.held: set[str] = set()
        self.ledger = Ledger(
            [], LedgerOptions(breaker_failures=3, breaker_cooldown=5, slow_start=10)
        )
        self.engines = EngineRegistry(self.ledger)
        self.engines.keep_known(lambda: self.held)
        self.engines.when_forgotten(self.forgotten.append)
        self.setup = Setup(self.engines)
        self.tasks = TaskOwner("fleet")
        self.observers = Observers([self])
        self.members = Membership(
            self.setup,
            self.engines,
            self.ledger,
            self.observers,
            self.tasks,
            lambda: self.time,
            Deadlines(engine_drain=30),
            self.left.append,
        )

    def changes(self) -> list[tuple[str, str, str]]:
        """Changes of members: the engine, what, by whom."""
        found = [
            (one.node[7:8], one.change, one.by)
            for one in self.events
            if isinstance(one, MemberChanged)
        ]
        self.events.clear()
        return found

    def up(self, *engines: ConfiguredEngine) -> None:
        """Have engines answer their probes."""
        for engine in engines:
            self.ledger.mark_up(engine.url, EVIDENCE)
            self.observers.notify(NodeChanged(engine.url, engine.role, up=True, reason=""))

    def lease(self, without: str = "") -> Lease | None:
        return self.ledger.assign_alone(Ask("m", 1, self.time), without=[without])

    def close(self, lease: Lease | None) -> None:
        assert lease is not None
        self.ledger.close(lease, Verdict.GOOD, self.time)

    async def gone(self, engine: ConfiguredEngine) -> None:
        """Wait until nothing is known of an engine."""
        await until(lambda: engine.url not in self.engines.known)


@pytest.fixture
async def w(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(membership, "LOOK", 0.001)
    made = World()
    for engine in (A, B):
        made.setup.add(engine)
    made.members.adopt([A, B])
    made.up(A, B)
    made.changes()
    yield made
    await made.tasks.settle(0)


async def test_an_idle_engine_leaves_at_once(w: World) -> None:
    """And nothing is known of it then."""
    w.members.drain(A.url, "admin", removes=True)
    assert w.left == [A.url]
    assert [lease and lease.engine.url for lease in (w.lease(), w.lease())] == [B.url] * 2
    await w.gone(A)
    assert list(w.members.members) == [B.url]
    assert w.forgotten == [A.url]
    assert w.changes() == [("a", "draining", "admin"), ("a", "removed", "admin")]


async def test_it_stays_while_it_has_leases_and_kv(w: World) -> None:
    """First the lease ends, then what draws on its KV."""
    leases = [w.lease(), w.lease()]
    mine = next(one for one in leases if one is not None and one.engine.url == A.url)
    w.held.add(A.url)
    w.members.drain(A.url, "admin", removes=True)
    (text,) = w.members.shortcomings()
    assert (
        text == f"decode {A.url} is being drained (by admin): 1 requests are left, for at most 30 s"
    )
    await later_turns()
    w.close(mine)
    await later_turns()
    assert w.members.state(A.url) is MemberState.DRAINING
    assert "KV of it is still to be read" in w.members.shortcomings()[0]
    w.held.clear()
    await w.gone(A)
    assert w.members.shortcomings() == []


async def test_what_is_late_ends(w: World) -> None:
    """Its legs are ended at the deadline; what is left then keeps it known, not in the pool."""
    leases = [w.lease(), w.lease()]
    mine = next(one for one in leases if one is not None and one.engine.url == A.url)
    leg = Leg(lambda: None)
    w.engines[A.url].open_legs.add(leg)
    w.members.drain(A.url, "admin", seconds=7, removes=True)
    w.time += 6.9
    await later_turns()
    assert leg.errors == []
    w.time += 0.2
    await until(lambda: leg.errors)
    (error,) = leg.errors
    assert isinstance(error, EngineTimeoutError)
    assert error.wait is Wait.ENGINE_DRAIN
    assert [one for one in w.events if isinstance(one, DeadlinePassed)] == [
        DeadlinePassed("engine_drain", A.url)
    ]
    assert A.url in w.engines
    w.time += membership.LAST
    await until(lambda: A.url not in w.engines)
    assert w.engines.known[A.url].in_ledger.requests == 1
    w.close(mine)
    await w.gone(A)


async def test_maintenance(w: World) -> None:
    """An engine that is drained to be kept waits until it is undrained."""
    w.members.drain(A.url, "admin")
    await until(lambda: w.members.state(A.url) is MemberState.DRAINED)
    assert w.members.shortcomings() == [
        f"decode {A.url} is drained (by admin): it gets no requests until it is undrained"
    ]
    w.members.drain(B.url, "admin")
    assert w.lease() is None
    assert w.ledger.not_ready() == (
        f"no decode or aggregated engine is up: {A.url} is drained; {B.url} is being drained"
    )
    w.up(A)
    assert w.lease() is None, "a probe changes nothing"
    w.members.undrain(A.url, "admin")
    assert w.members.state(A.url) is MemberState.SERVING
    lease = w.lease()
    assert lease is not None
    assert lease.engine.url == A.url
    with pytest.raises(MembershipError, match="is not being drained"):
        w.members.undrain(A.url, "admin")
    changes = [(name, change) for name, change, _ in w.changes()]
    assert changes == [("a", "draining"), ("a", "drained"), ("b", "draining"), ("a", "undrained")]


async def test_a_drained_engine_is_removed_later(w: World) -> None:
    """The second drain only adds to the first."""
    w.members.drain(A.url, "admin")
    await until(lambda: w.members.state(A.url) is MemberState.DRAINED)
    w.members.drain(A.url, "settings", removes=True)
    await w.gone(A)
    assert w.left == [A.url]
    assert w.changes()[-1] == ("a", "removed", "settings"), "not by whom it was drained before"


async def test_an_engine_that_comes_while_others_serve_begins_slowly(w: World) -> None:
    """Not those of the start, and not if there is no other; a second time up is no beginning."""
    assert not w.ledger.breakers.opened
    member = w.members.add(C, "admin")
    states = [w.members.state(C.url)]
    w.ledger.mark_down(C.url, "loads its model", w.time)
    states.append(w.members.state(C.url))
    w.up(C)
    states.append(w.members.state(C.url))
    assert states == [MemberState.JOINING, MemberState.PROBING, MemberState.WARMING]
    assert w.engines[C.url].in_ledger.trial_places == 2
    taken = [lease.engine.url for lease in (w.lease() for _ in range(12)) if lease is not None]
    assert taken.count(C.url) == 2
    w.time += 11
    assert not w.ledger.breakers.any_left(w.time)
    assert w.members.state(C.url) is MemberState.SERVING
    w.ledger.mark_down(C.url, "gone", w.time)
    w.up(C)
    assert not w.ledger.breakers.opened
    for engine in (A, B, C):
        w.members.remove(engine.url, member.source if engine is C else "settings", at_once=True)
    w.members.add(A, "admin")
    w.up(A)
    assert not w.ledger.breakers.opened


async def test_an_engine_that_restarts_while_others_serve_begins_slowly(w: World) -> None:
    """Its caches are empty, and what it had was given to others: not all of it comes back at
    once.
    """
    again = Evidence(frozenset("m"), "1", 16, (), 0, 2.0)
    w.ledger.mark_down(A.url, "restarts", w.time)
    w.ledger.mark_up(A.url, EVIDENCE)
    assert not w.ledger.breakers.opened, "it is the same run"
    w.ledger.mark_up(A.url, again)
    assert w.members.state(A.url) is MemberState.WARMING
    taken = [lease.engine.url for lease in (w.lease() for _ in range(12)) if lease is not None]
    assert taken.count(A.url) == 2
    w.time += 11
    w.ledger.breakers.any_left(w.time)
    w.members.remove(B.url, "settings", at_once=True)
    w.ledger.mark_up(A.url, Evidence(frozenset("m"), "1", 16, (), 0, 3.0))
    assert not w.ledger.breakers.opened, "there is no other"


async def test_an_engine_that_was_restarted_while_drained_begins_slowly(w: World) -> None:
    """From when it is undrained: that may be long after it came up."""
    w.members.drain(A.url, "admin")
    await until(lambda: w.members.state(A.url) is MemberState.DRAINED)
    w.ledger.mark_up(A.url, Evidence(frozenset("m"), "1", 16, (), 0, 2.0))
    assert not w.ledger.breakers.opened
    w.time += 60
    w.members.undrain(A.url, "admin")
    assert w.members.state(A.url) is MemberState.WARMING
    assert w.engines[A.url].in_ledger.slow_until == w.time + 10


async def test_a_replaced_engine_keeps_its_breaker(w: World) -> None:
    """It is the same process: other settings make it no better. What is known of its load stays,
    too.
    """
    for _ in range(3):
        lease = w.lease(B.url)
        assert lease is not None
        w.ledger.close(lease, Verdict.FAILED, w.time)
    engine = w.engines[A.url].in_ledger
    assert engine.open_until == w.time + 5
    engine.window = 7.0
    seen: list[str | None] = []
    w.engines.when_forgotten(lambda url: seen.append(url))
    w.members.apply("settings", [msgspec.structs.replace(A, facts=Facts(block_size=32)), B])
    new = w.engines[A.url].in_ledger
    assert new is not engine
    assert (new.open_until, new.failures, new.window) == (w.time + 5, 3, 7.0)
    assert not new.usable(w.time)
    assert w.engines.replaced is None
    w.time += 5
    leases = [lease.engine.url for lease in (w.lease() for _ in range(4)) if lease is not None]
    assert leases.count(A.url) == 1, "half-open, as it would have been"
    w.members.apply("settings", [msgspec.structs.replace(A, role="aggregated"), B])
    assert w.engines[A.url].in_ledger.open_until == 0, "in another role it is another engine"
    assert seen == []


async def test_a_replaced_engine_is_in_the_same_run(w: World) -> None:
    """What waits there for KV that will not come is counted on; after a restart it is not, as
    before.
    """
    stuck = StuckKv(w.engines.known, PushedToDecode())
    for _ in range(2):
        stuck.add(A.url, stuck.run_of(A.url), w.time)
    assert stuck.snapshot(w.time) == {A.url: (2, 0.0)}
    w.members.apply("settings", [msgspec.structs.replace(A, labels={"rack": "7"}), B])
    stuck.add(A.url, stuck.run_of(A.url), w.time)
    assert stuck.snapshot(w.time) == {A.url: (3, 0.0)}
    w.ledger.mark_up(A.url, dataclasses.replace(EVIDENCE, started=2.0))
    assert stuck.snapshot(w.time) == {}


async def test_a_source_removes_only_its_own(w: World) -> None:
    """What two want stays until neither does."""
    with pytest.raises(
        MembershipError, match=r"a:8000 was added by settings: admin can't remove it"
    ):
        w.members.remove(A.url, "admin")
    with pytest.raises(MembershipError, match="is no engine of this pool"):
        w.members.remove(C.url, "admin")
    assert w.members.add(A, "admin") is w.members.members[A.url]
    assert not w.members.remove(A.url, "settings")
    assert w.members.members[A.url].source == "admin"
    w.members.add(A, "dns")
    assert not w.members.remove(A.url, "dns")
    assert w.changes() == []
    assert w.members.remove(A.url, "admin")
    await w.gone(A)
    other = msgspec.structs.replace(B, role="aggregated")
    with pytest.raises(MembershipError, match="was added by settings, with other settings"):
        w.members.add(other, "admin")


async def test_one_that_leaves_is_wanted_again(w: World) -> None:
    """It serves on: a name whose addresses come and go costs nothing."""
    lease = w.lease()
    assert lease is not None
    url = lease.engine.url
    w.members.remove(url, "settings")
    engine = w.engines[url]
    w.members.add(w.members.members[url].settings, "dns")
    await later_turns()
    assert w.engines[url] is engine
    assert (w.members.state(url), w.members.members[url].source) == (MemberState.SERVING, "dns")


async def test_whole_sets(w: World) -> None:
    """Others' engines stay; what is the same is not touched, what has changed serves on at once."""
    w.members.add(C, "admin")
    w.changes()
    kept, changed = w.engines[A.url], msgspec.structs.replace(B, facts=Facts(block_size=32))
    old = w.lease(A.url)
    w.members.apply("settings", [A, changed])
    assert w.engines[A.url] is kept
    assert w.engines[B.url].in_ledger.up
    assert old is not None
    assert w.engines[B.url].in_ledger is not old.engine
    w.close(old)
    assert w.changes() == [("b", "replaced", "settings")]
    w.members.apply("settings", [changed])
    await w.gone(A)
    assert set(w.members.members) == {B.url, C.url}
    w.changes()
    w.members.apply("settings", [changed])
    assert w.changes() == []


async def test_maintenance_goes_on_with_other_settings(w: World) -> None:
    """An engine that an operator has drained gets no requests because its settings have changed."""
    w.members.drain(A.url, "admin")
    w.members.apply("settings", [msgspec.structs.replace(A, facts=Facts(block_size=32)), B])
    await until(lambda: w.members.state(A.url) is MemberState.DRAINED)
    assert not w.engines[A.url].in_ledger.available


@pytest.mark.parametrize("broken", [C, B], ids=["added", "replaced"])
async def test_a_set_that_fails_changes_nothing(w: World, broken: ConfiguredEngine) -> None:
    """The engines are as they were, and serve."""
    d = ConfiguredEngine(url="http://d:8000", role="decode")
    w.setup.broken.add(broken.url)
    setup_add = w.setup.add

    # only the new settings are broken
    def add(engine: ConfiguredEngine, *, is_checked: bool = False) -> Engine:
        if engine is B:
            return w.engines.add(
                EngineSpec(engine.url, Role(engine.role)), unused_client(engine.url)
            )
        return setup_add(engine)

    w.setup.add = add  # type: ignore[method-assign]
    other = [msgspec.structs.replace(one, facts=Facts(block_size=32)) for one in (A, B)]
    with pytest.raises(SettingsError, match="its key can't be read"):
        w.members.apply("settings", [d, *other, C])
    assert {url: one.settings for url, one in w.members.members.items()} == {A.url: A, B.url: B}
    assert set(w.engines) == {A.url, B.url}
    assert all(engine.in_ledger.available for engine in w.engines.values())


async def test_a_set_that_fails_has_leave_what_leaves(w: World) -> None:
    """It is not in the file that is in force, and nothing would have it leave later."""
    w.held.add(A.url)
    w.members.apply("settings", [B])
    w.setup.broken.add(C.url)
    with pytest.raises(SettingsError, match="its key can't be read"):
        w.members.apply("settings", [A, B, C])
    assert w.members.members[A.url].leaves
    assert not w.engines[A.url].in_ledger.available
    w.setup.broken.clear()
    w.members.apply("settings", [A, B, C])
    assert w.engines[A.url].in_ledger.available


async def test_the_old_settings_are_broken_too(w: World) -> None:
    """A key file was moved: nothing is a member without an engine, and others serve."""
    w.setup.broken.add(A.url)
    with pytest.raises(SettingsError, match="its key can't be read"):
        w.members.apply("settings", [msgspec.structs.replace(A, facts=Facts(block_size=32)), B])
    assert set(w.members.members) == set(w.engines) == {B.url}
    assert w.members.shortcomings() == []


async def test_prefill_engines_come_before_decode_engines_that_name_them(w: World) -> None:
    """In whatever order the file has them."""
    p, q = (ConfiguredEngine(url=f"http://{name}:8000", role="prefill") for name in "pq")
    d = ConfiguredEngine(url="http://d:8000", role="decode", sources=(p.url, q.url))
    w.members.apply("settings", [A, d, p, B, q])
    assert list(w.engines) == [A.url, B.url, p.url, q.url, d.url]


async def test_a_replaced_engine_is_forgotten_while_its_buffer_is_used(w: World) -> None:
    """The new one has it."""
    w.setup.capacity = 4
    w.members.add(C, "settings")
    w.up(C)
    buffer = w.engines[C.url].buffer
    assert buffer is not None
    buffer.taken = 1
    w.members.apply("settings", [A, B, msgspec.structs.replace(C, facts=Facts(block_size=32))])
    assert w.engines[C.url].buffer is buffer
    await until(lambda: not w.engines.leaving)
    assert w.engines.needed(w.engines[C.url])


async def test_there_is_a_bound(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources can't fill the memory."""
    monkeypatch.setattr(membership, "MAX_MEMBERS", 2)
    with pytest.raises(MembershipError, match="there are 2 engines already"):
        w.members.add(C, "dns")
    assert C.url not in w.engines


@pytest.mark.parametrize("how", ["undrain", "remove", "both"])
async def test_two_orders_at_the_same_time(w: World, how: str) -> None:
    """Each is one step: the later one counts."""
    w.held.add(A.url)
    w.members.drain(A.url, "admin", removes=True)
    if how == "remove":
        w.members.remove(A.url, "settings", at_once=True)
    else:
        w.members.undrain(A.url, "admin")
    if how == "both":
        w.members.drain(A.url, "admin", removes=True)
    w.held.clear()
    await later_turns()
    assert (A.url in w.engines) == (how == "undrain")
    assert not w.members._ending
