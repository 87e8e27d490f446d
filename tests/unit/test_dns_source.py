"""A source that follows a name: which answers change the pool, and which do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial

import pytest

from pdproxy.fleet import membership
from pdproxy.fleet.dns_source import DnsSource
from pdproxy.fleet.sources import FoundEngines
from pdproxy.observe.events import DeadlinePassed
from pdproxy.settings.dns import Dns, DnsName, dns_name
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.upstream.resolver import DnsRecords, LookupFailedError
from tests.fakes.world import until
from tests.unit.test_membership import World

NAME = dns_name("dns://engines:8000", ("url",))
TEMPLATE = ConfiguredEngine(url=NAME.url, role="decode", labels={"rack": "7"})
FAILED = LookupFailedError("no such name")
Found = Mapping[str, DnsRecords | LookupFailedError]


class Names:
    """Answers what a test says."""

    def __init__(self) -> None:
        self.found: Found = {}

    async def look_up(self, name: DnsName) -> Found:
        return self.found

    def are(
        self, *hosts: str, ttl: float = 20, six: DnsRecords | LookupFailedError | None = None
    ) -> None:
        """The next answers."""
        self.found = {
            "A": DnsRecords(tuple((host, None) for host in hosts), ttl),
            "AAAA": six or DnsRecords((), 60),
        }


@pytest.fixture
async def w(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(membership, "LOOK", 0.001)
    made = World()
    yield made
    await made.tasks.settle(0)


@pytest.fixture
def names() -> Names:
    return Names()


class Followed(FoundEngines):
    """The engines of a name, each look of which a test says."""

    def __init__(
        self, w: World, names: Names, name: DnsName = NAME, template: ConfiguredEngine = TEMPLATE
    ) -> None:
        super().__init__(template, w.members, w.observers, lambda: w.time)
        self.source = DnsSource(name, names.look_up, Dns(min_ttl=5, max_ttl=60), lambda: 0.5)

    async def look(self) -> float:
        """Have what is answered. Return in how many seconds it is asked again."""
        answer, pause = await self.source.look()
        self.answered(answer)
        return pause


@pytest.fixture
def source(w: World, names: Names) -> Followed:
    return Followed(w, names)


def urls(*hosts: str) -> set[str]:
    return {f"http://{host}:8000" for host in hosts}


async def test_it_follows_the_name(w: World, names: Names, source: Followed) -> None:
    """Engines that stay are not touched, one that is missing once stays, and one that is missing
    twice goes.
    """
    assert source.shortcomings() == ["dns://engines:8000: has not been answered yet"]
    names.are("10.0.0.1", "10.0.0.2")
    assert await source.look() == 20
    assert set(w.members.members) == urls("10.0.0.1", "10.0.0.2")
    member = w.members.members["http://10.0.0.1:8000"]
    assert (member.source, member.settings.labels, member.settings.role) == (
        NAME.url,
        {"rack": "7"},
        "decode",
    )
    assert source.shortcomings() == []
    kept = w.engines["http://10.0.0.1:8000"]
    names.are("10.0.0.1", "10.0.0.3")
    await source.look()
    assert set(w.members.members) == urls("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert w.members.members["http://10.0.0.2:8000"].drain is None
    await source.look()
    assert w.engines["http://10.0.0.1:8000"] is kept
    await until(lambda: set(w.members.members) == urls("10.0.0.1", "10.0.0.3"))
    assert source.counts == {"changed": 3}
    await source.look()
    assert source.counts == {"changed": 3, "same": 1}


async def test_one_that_flaps_is_not_touched(w: World, names: Names, source: Followed) -> None:
    """It is missing in every second answer."""
    for hosts in [("10.0.0.1", "10.0.0.2"), ("10.0.0.1",)] * 4:
        names.are(*hosts)
        await source.look()
    assert [change for _, change, _ in w.changes()] == ["added", "added"]


async def test_one_that_comes_back_before_it_is_gone_serves_on(
    w: World, names: Names, source: Followed
) -> None:
    names.are("10.0.0.1", "10.0.0.2")
    await source.look()
    engine = w.engines["http://10.0.0.2:8000"]
    w.held.add(engine.url)
    names.are("10.0.0.1")
    await source.look()
    await source.look()
    assert w.members.members[engine.url].leaves
    names.are("10.0.0.1", "10.0.0.2")
    await source.look()
    assert w.engines[engine.url] is engine
    assert w.members.members[engine.url].drain is None


async def test_empty_answers_count_twice(w: World, names: Names, source: Followed) -> None:
    """Then no engine is left, and that is named."""
    names.are("10.0.0.1")
    await source.look()
    names.are()
    await source.look()
    assert set(w.members.members) == urls("10.0.0.1")
    assert source.shortcomings() == []
    await source.look()
    await until(lambda: not w.members.members)
    assert source.shortcomings() == [
        "dns://engines:8000: names no engine, for 0 s: no engine of it is known"
    ]
    assert source.counts == {"changed": 1, "same": 1, "empty": 1}


async def test_failures_keep_the_last_answer(w: World, names: Names, source: Followed) -> None:
    """However many, with pauses that grow up to a bound; the deadline is counted."""
    names.are("10.0.0.1")
    await source.look()
    names.found = {"A": FAILED, "AAAA": LookupFailedError("no answer in 5 s", late=True)}
    assert [await source.look() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    w.time += 60
    assert set(w.members.members) == urls("10.0.0.1")
    assert source.shortcomings() == [
        "dns://engines:8000: no such name, for 60 s: its last answer stays in use"
    ]
    assert [one for one in w.events if isinstance(one, DeadlinePassed)] == [
        DeadlinePassed("dns")
    ] * 7
    names.are("10.0.0.1")
    assert await source.look() == 20
    assert source.shortcomings() == []
    assert source.counts["failed"] == 7


async def test_a_family_that_never_answers(w: World, names: Names, source: Followed) -> None:
    """Servers that know nothing of IPv6 fail for it for ever; one that has known it is missed."""
    names.are("10.0.0.1", six=FAILED)
    await source.look()
    assert source.shortcomings() == []
    names.are("10.0.0.1", six=DnsRecords((("fd00::1", None),), 7))
    assert await source.look() == 7
    assert "http://[fd00::1]:8000" in w.members.members
    names.are("10.0.0.1", six=FAILED)
    await source.look()
    await source.look()
    assert "http://[fd00::1]:8000" in w.members.members
    assert source.shortcomings() == [
        "dns://engines:8000: no such name, for 0 s: its last answer stays in use"
    ]


@pytest.mark.parametrize(("ttl", "wait"), [(0, 5), (1, 5), (20, 20), (86_400, 60)])
async def test_times_to_live_have_bounds(
    names: Names, source: Followed, ttl: float, wait: float
) -> None:
    names.are("10.0.0.1", ttl=ttl)
    assert await source.look() == wait


async def test_what_another_source_has_does_not_keep_others_out(
    w: World, names: Names, source: Followed
) -> None:
    """With the same settings both own it; with others it stays as it is, and is named."""
    theirs = ConfiguredEngine(url="http://10.0.0.1:8000", role="decode", facts=Facts(block_size=32))
    w.members.add(theirs, "admin")
    w.members.add(
        ConfiguredEngine(url="http://10.0.0.2:8000", role="decode", labels={"rack": "7"}), "admin"
    )
    names.are("10.0.0.1", "10.0.0.2", "10.0.0.3")
    await source.look()
    assert set(w.members.members) == urls("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert w.members.members["http://10.0.0.1:8000"].settings == theirs
    assert source.shortcomings() == [
        "dns://engines:8000: http://10.0.0.1:8000 was added by admin, with other settings"
    ]
    assert not w.members.remove("http://10.0.0.2:8000", "admin")
    assert w.members.members["http://10.0.0.2:8000"].source == NAME.url
    w.members.remove("http://10.0.0.1:8000", "admin", at_once=True)
    await source.look()
    assert w.members.members["http://10.0.0.1:8000"].source == NAME.url
    assert source.shortcomings() == []


async def test_engines_that_can_not_be_added(w: World, names: Names, source: Followed) -> None:
    """Nothing changes, and it is named; the next answer tries again."""
    w.setup.broken.add("http://10.0.0.1:8000")
    names.are("10.0.0.1", "10.0.0.2")
    await source.look()
    assert not w.members.members
    assert source.shortcomings() == [
        "dns://engines:8000: its key can't be read, for 0 s: no engine of it is known"
    ]
    w.setup.broken.clear()
    await source.look()
    assert set(w.members.members) == urls("10.0.0.1", "10.0.0.2")
    assert (source.counts, source.shortcomings()) == ({"failed": 1, "changed": 1}, [])


async def test_both_families_together_have_a_bound(
    w: World, names: Names, source: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dns, "most", 2)
    names.are("10.0.0.1", "10.0.0.2", six=DnsRecords((("fd00::1", None),), 9))
    await source.look()
    assert not w.members.members
    assert "names 3 engines: 2 at most" in source.shortcomings()[0]


async def test_the_engines_of_the_first_answer_are_not_new(
    w: World, names: Names, source: Followed
) -> None:
    """They serve from the start, as those of the settings do. Later ones begin slowly."""
    names.are("10.0.0.1", "10.0.0.2")
    await source.look()
    w.up(*(w.members.members[url].settings for url in sorted(urls("10.0.0.1", "10.0.0.2"))))
    assert not w.ledger.breakers.opened
    names.are("10.0.0.1", "10.0.0.2", "10.0.0.3")
    await source.look()
    w.up(w.members.members["http://10.0.0.3:8000"].settings)
    assert [engine.url for engine in w.ledger.breakers.opened] == ["http://10.0.0.3:8000"]


async def test_many_proxies_do_not_ask_at_once(names: Names) -> None:
    """Times differ by a tenth to both sides."""
    names.are("10.0.0.1", ttl=10)
    waits = []
    for chance in (0.0, 1.0):
        _, wait = await DnsSource(NAME, names.look_up, Dns(), partial(float, chance)).look()
        waits.append(wait)
    assert waits == pytest.approx([9, 11])


async def test_targets_that_no_engine_can_have(w: World, names: Names) -> None:
    """They keep no other target out, and are named."""
    name = dns_name("srv://_vllm._tcp.x", ("url",))
    source = Followed(w, names, name, ConfiguredEngine(url=name.url, role="decode"))
    wrong = ["a\\032b", "x/y", "a@b", "0:0::1", "ö"]
    names.found = {"SRV": DnsRecords(tuple((host, 80) for host in [*wrong, "good.example"]), 9)}
    await source.look()
    assert set(w.members.members) == {"http://good.example:80"}
    assert len(source.shortcomings()) == len(wrong)
    assert all(text.endswith("can't be an engine's URL") for text in source.shortcomings())


async def test_an_answer_to_a_name_that_was_given_up(w: World, names: Names) -> None:
    """It changes nothing, also where the library that asks loses the cancellation."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def look_up(name: DnsName) -> Found:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await answered.wait()
        return await names.look_up(name)

    source, found = (
        DnsSource(NAME, look_up, Dns()),
        FoundEngines(TEMPLATE, w.members, w.observers, lambda: w.time),
    )
    names.are("10.0.0.1")
    task = w.tasks.keep(partial(source.run, found.answered), found.name)
    await asked.wait()
    w.tasks.end(task)
    found.give_up()
    await asyncio.wait([task], timeout=30)
    assert task.done()
    assert not w.members.members
