"""The registry: what becomes of an engine's state, leases and task when it is added and removed."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.fleet.contacts import MIN_CONTACTS, Contacts
from pdproxy.fleet.engine import Engine, EngineCredentials
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError
from pdproxy.kit.tasks import MAX_NAME, Pauses, TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import End
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.nixl import NIXL
from tests.fakes.clock import later_turns
from tests.fakes.registry import USUAL_HOSTS, registry, unused_client

SPLIT = (Role.PREFILL, Role.DECODE)
P, D, E = EngineSpec("p", Role.PREFILL), EngineSpec("d", Role.DECODE), EngineSpec("e", Role.DECODE)


def up(ledger: Ledger, *urls: str, started: float = 1.0) -> None:
    """Have probed engines."""
    for url in urls:
        ledger.mark_up(url, Evidence(frozenset("m"), "1", 16, (), 0, started))


class Watcher:
    """Writes down what it is called for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def added(self, engine: Engine) -> None:
        self.calls.append(("added", engine.url))

    def removed(self, engine: Engine) -> None:
        self.calls.append(("removed", engine.url))


def test_watchers_are_called_for_each_change() -> None:
    """In order; what failed is no change."""
    engines, _ = registry(P)
    watcher = Watcher()
    engines.watch(watcher)
    engines.add(D, unused_client("d"))
    with pytest.raises(ValueError, match="d is there already"):
        engines.add(D, unused_client("d"))
    engines.remove("p")
    with pytest.raises(KeyError):
        engines.remove("p")
    assert watcher.calls == [("added", "d"), ("removed", "p")]
    assert (list(engines), len(engines)) == (["d"], 1)


def test_credentials_while_legs_are_under_way() -> None:
    """A removed engine's key is there as long as it has leases, and one change longer."""
    engines, ledger = registry(D)
    engines.add(E, unused_client("e"), EngineCredentials(lambda: "key"))
    up(ledger, "d", "e")
    leases = [ledger.assign_alone(Ask("m", 1, 0.0), without=["d"]) for _ in range(2)]
    engines.remove("e")
    engines.remove("d")
    assert engines.key("e") == "key"
    for lease in leases:
        assert lease is not None
        ledger.close(lease, Verdict.GOOD, 0.0)
    engines.add(D, unused_client("d"))
    with pytest.raises(EngineError, match="e was removed"):
        engines.key("e")
    with pytest.raises(EngineError, match="e was removed"):
        engines.tls("e")
    assert engines.key("d") is None


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("again", [False, True], ids=["gone", "added again"])
def test_a_lease_is_closed_after_its_engine_was_removed(verdict: Verdict, again: bool) -> None:
    """Whatever it shows, it changes no other engine, also not the next one with its URL, and opens
    no breaker.
    """
    engines, ledger = registry(P, D, E)
    up(ledger, "p", "d", "e")
    pair = ledger.assign(SPLIT, Ask("m", 10, 0.0), without=["e"])
    others = [ledger.assign_alone(Ask("m", 1, 0.0), without=["e"]) for _ in range(5)]
    assert pair is not None
    engines.remove("d")
    if again:
        engines.add(D, unused_client("d"))
        up(ledger, "d")
    reported = [
        ledger.close(lease, verdict, 1.0)
        for lease in (pair[Role.DECODE], *others)
        if lease is not None
    ]
    assert reported == [False] * 6
    assert all(engine.up for engine in ledger.engines)
    assert (pair[Role.DECODE].engine.requests, pair[Role.DECODE].engine.prompt_bytes) == (0, 0)
    ledger.close(pair[Role.PREFILL], Verdict.GOOD, 1.0)
    assert [engine.requests for engine in ledger.engines] == [0] * len(engines)
    assert [engine.failures for engine in ledger.engines] == [0] * len(engines)
    assert not ledger.breakers.opened
    found = ledger.assign(SPLIT, Ask("m", 10, 2.0), without=["d"])
    assert found is not None
    assert found[Role.DECODE].engine.url == "e"


def test_nobody_gets_a_removed_engine() -> None:
    """Neither by the quick way nor by the slow one, also not for a release."""
    engines, ledger = registry(P, D, E)
    up(ledger, "p", "d", "e")
    chosen = {
        pair[Role.DECODE].engine.url
        for _ in range(4)
        if (pair := ledger.assign(SPLIT, Ask("m", 1, 0.0))) is not None
    }
    assert chosen == {"d", "e"}
    engines.remove("d")
    ask = Ask("m", 1, 0.0)
    for without in ([], ["x"]):
        for _ in range(4):
            pair, alone = (
                ledger.assign(SPLIT, ask, without=without),
                ledger.assign_alone(ask, without=without),
            )
            assert pair is not None
            assert alone is not None
            assert (pair[Role.DECODE].engine.url, alone.engine.url) == ("e", "e")
    releaser = ledger.releasing.through("p", "m", 0.0, prefer_not="e")
    assert releaser is not None
    assert releaser.url == "e"
    engines.remove("p")
    assert ledger.assign(SPLIT, Ask("m", 1, 0.0)) is None
    assert ledger.releasing.through("p", "m", 0.0) is not None, (
        "its handles are still to be released"
    )


def test_an_ejected_pair_is_forgotten_with_its_engine() -> None:
    """And to eject one whose engine is gone changes nothing."""
    engines, ledger = registry(P, D)
    up(ledger, "p", "d")
    ledger.eject("p", "d")
    assert ledger.assign(SPLIT, Ask("m", 1, 0.0)) is None
    engines.remove("d")
    ledger.eject("p", "d")
    engines.add(D, unused_client("d"))
    up(ledger, "d")
    assert ledger.assign(SPLIT, Ask("m", 1, 0.0)) is not None


def test_a_run_is_told_from_those_before_the_removal() -> None:
    """Also before the first probe."""
    engines, ledger = registry(D)
    up(ledger, "d")
    up(ledger, "d", started=2.0)
    runs = [engines["d"].in_ledger.run_number]
    engines["d"].run.proven["m", None, False] = 1  # type: ignore[index]
    engines.remove("d")
    engines.add(D, unused_client("d"))
    runs.append(engines["d"].in_ledger.run_number)
    up(ledger, "d")
    runs.append(engines["d"].in_ledger.run_number)
    assert len(set(runs)) == 3
    assert not engines["d"].run.proven


async def test_a_kept_task_ends_and_is_forgotten() -> None:
    """With its failures: neither /ready nor the metrics name it any more."""
    owner = TaskOwner("owner", Pauses(first=60))

    async def fail() -> None:
        raise ValueError

    failing = owner.keep(fail, "one")
    task = owner.keep(lambda: asyncio.sleep(60), "other")
    await later_turns()
    assert (len(owner.shortcomings()), dict(owner.failures())) == (1, {"one": 1, "other": 0})
    owner.end(failing)
    await later_turns()
    assert (owner.shortcomings(), dict(owner.failures()), len(owner)) == ([], {"other": 0}, 1)
    assert not task.cancelled()
    await owner.settle(0)


async def test_tasks_whose_long_names_begin_alike_end_each_by_itself() -> None:
    """Names are shortened where they are shown: a metric has each name once."""
    owner = TaskOwner("owner")
    one, other = (owner.keep(lambda: asyncio.sleep(60), "x" * MAX_NAME + end) for end in "ab")
    await asyncio.sleep(0)
    assert [count for _, count in owner.failures()] == [0]
    owner.end(one)
    await later_turns()
    assert (one.done(), other.done(), len(list(owner.failures()))) == (True, False, 1)
    await owner.settle(0)


def test_a_release_goes_to_the_decode_engines_of_a_removed_prefill_engine() -> None:
    """Also where others are up: they can't read its KV."""
    specs = (P, EngineSpec("q", Role.PREFILL), EngineSpec("d", Role.DECODE, frozenset("p")))
    engines, ledger = registry(*specs, EngineSpec("e", Role.DECODE, frozenset("q")))
    up(ledger, "p", "q", "d", "e")
    for _ in range(2):
        found = ledger.releasing.through("p", "m", 0.0, prefer_not="d")
        assert found is not None
        assert found.url == "d"
        if "p" in engines:
            engines.remove("p")


def test_an_engine_is_known_while_it_may_hold_kv() -> None:
    """While somebody names it, or slots of its buffer are taken. Its release goes through its
    client.
    """
    engines, _ = registry(P)
    named = {"d"}
    engines.keep_known(lambda: named)
    engines.add(D, unused_client("d"))
    buffered = engines.add(E, unused_client("e"), buffer_capacity=4)
    assert buffered.buffer is not None
    buffered.buffer.taken = 1
    for url in ("d", "e", "p"):
        engines.remove(url)
    assert set(engines.known) == {"d", "e"}
    named.clear()
    buffered.buffer.taken = 0
    engines.add(P, unused_client("p"))
    assert set(engines.known) == {"p"}


def test_nothing_grows_with_the_engines_that_were_removed() -> None:
    """Not the ledger, not the registry, not the pairs that have met; those that are there stay
    met.
    """
    engines, ledger = registry(P, D)
    up(ledger, "p", "d")
    contacts = Contacts(engines.known)
    engines.when_forgotten(contacts.forget)
    first = engines["p"].in_ledger.run_number, engines["d"].in_ledger.run_number
    contacts.add(*first)
    for number in range(1000):
        url = f"d{number}"
        engines.add(EngineSpec(url, Role.DECODE), unused_client(url))
        pair = first[0], engines[url].in_ledger.run_number
        assert not contacts.met(*pair)
        contacts.add(*pair)
        assert contacts.met(*pair)
        engines.remove(url)
        assert not contacts.met(*pair)
        contacts.add(*pair)
    assert contacts.met(*first)
    assert len(contacts._pairs) <= MIN_CONTACTS
    sizes = [
        len(kept)
        for owner in (ledger, engines)
        for kept in vars(owner).values()
        if isinstance(kept, dict | list)
    ]
    assert max(sizes) < 10


def test_many_pairs_stay_met() -> None:
    """Dropping old pairs drops none of the present engines."""
    specs = [EngineSpec(f"{role.value}{n}", role) for role in SPLIT for n in range(20)]
    engines, _ = registry(*specs)
    contacts = Contacts(engines.known)
    runs = {spec.url: engines[spec.url].in_ledger.run_number for spec in specs}
    pairs = [(runs[p.url], runs[d.url]) for p in specs[:20] for d in specs[20:]]
    for pair in pairs:
        contacts.add(*pair)
    assert all(contacts.met(*pair) for pair in pairs)
    up(engines._ledger, "decode0")
    assert engines["decode0"].in_ledger.run_number != runs["decode0"]
    assert not contacts.met(runs["prefill0"], engines["decode0"].in_ledger.run_number)


def test_a_notice_behind_a_restart_is_of_the_run_before() -> None:
    """A decode engine has read KV, and is started again before that is known: its new run has met
    nobody.
    """
    engines, ledger = registry(P, D)
    up(ledger, "p", "d")
    kept = Custodian(
        NIXL, ledger, engines.known, Deadlines(), Observers([]), lambda: 0.0, Clock(), USUAL_HOSTS
    )
    prefill, asked = engines["p"].in_ledger.run_number, engines["d"].in_ledger.run_number
    custody = kept.take(
        Handle(b"{}", None, 16, "r1"), PrefillRecord("p", None, (), lambda _: "none", run=prefill)
    )
    custody.spend(asked)
    up(ledger, "d", started=2.0)
    assert engines["d"].in_ledger.run_number != asked
    custody.end(End.LOADED)
    assert kept.contacts.met(prefill, asked)
    assert not kept.contacts.met(prefill, engines["d"].in_ledger.run_number)
