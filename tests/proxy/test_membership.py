"""Engines that are added, drained and removed while clients stream, and what is left of those that
went.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import msgspec
import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet import membership, prober
from pdproxy.fleet.member import MemberState
from pdproxy.fleet.membership import SETTINGS
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.health import Health
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.remains import remains
from tests.fakes.scripts import WORD
from tests.fakes.streams import LONGER, TOKENS, streaming
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

CLIENTS, CHANGES = 64, 200


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)


async def started(w: World, role: str, **facts: object) -> FakeEngine:
    """Start one more engine, which the proxy does not know."""
    engine = FakeEngine(role, w.books, **facts)  # type: ignore[arg-type]
    await engine.listen()
    w.engines.append(engine)
    (w.prefill if role == "prefill" else w.decode).append(engine)
    for prefill in w.prefill:
        for other in w.decode:
            other.meet(prefill)
    return engine


def node(engine: FakeEngine) -> ConfiguredEngine:
    return ConfiguredEngine(url=engine.url, role=engine.role)  # type: ignore[arg-type]


async def up(w: World, engine: FakeEngine) -> None:
    """Wait until an engine is up."""
    await until(lambda: w.proxy.engines[engine.url].in_ledger.up)


async def gone(w: World, url: str) -> None:
    """Wait until an engine is forgotten."""
    await until(lambda: not any(url in one.engines.known for one in w.workers))
    await until(lambda: not [task for task in asyncio.all_tasks() if url in task.get_name()])
    await asyncio.sleep(0)  # callbacks of tasks that are done run in the next turn


async def nothing_is_left(w: World, names: Collection[str], *skip: object) -> None:
    """See that a proxy keeps nothing with one of these names."""
    for one in w.others:
        one.share._shown.report()  # type: ignore[union-attr]  # the last report of each is kept
    if w.others:  # they look from time to time at what others have
        await until(lambda: not remains(w.proxy, names, skip))
    assert remains(w.proxy, names, skip) == []


def _policy(**fields: object) -> Callable[[Settings], Settings]:
    def adjust(settings: Settings) -> Settings:
        pool = msgspec.structs.replace(settings.pool, policy=PoolPolicy(**fields))  # type: ignore[arg-type]
        return msgspec.structs.replace(
            settings, pools=(pool,), health=Health(stalled_after=0, slow_start=0.01)
        )

    return adjust


@pytest.mark.parametrize(
    "adjust",
    [
        _policy(),
        _policy(prefill="round_robin", decode="round_robin"),
        _policy(prefill="prefix", decode="session"),
        _policy(placement="auto"),
    ],
    ids=["least_load", "round_robin", "prefix", "auto"],
)
@pytest.mark.parametrize("how", ["drained", "at once"])
async def test_nothing_is_left_of_an_engine_that_went(
    how: str, adjust: Callable[[Settings], Settings]
) -> None:
    """Not even of one whose last leg fails when it is no member any more."""
    async with world(adjust=adjust, limits={"engine_requests": "auto", "attempts": 5}) as w:
        new = [await started(w, role) for role in ("prefill", "decode")]
        for engine in new:
            w.proxy.membership.add(node(engine), "admin")
            await up(w, engine)
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        for engine in w.decode:
            engine.script(*[scripts.reset] * 2)
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert any(engine.requests for engine in new), "not all policies use both"
        names = [engine.url.removeprefix("http://") for engine in new]
        skip = (w._recorder,)
        assert remains(w.proxy, names, skip), "they are found before"

        for engine in w.decode:
            engine.scripts.clear()
        go = asyncio.Event()
        client = await w.client()
        for engine in w.decode:
            engine.script(scripts.after_word(go, _breaks_off))
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert await client.piece() == WORD
        busy = {one.url for one in w.proxy.ledger.engines if one.requests}
        for engine in new:
            w.proxy.membership.remove(engine.url, "admin", at_once=how == "at once")
        if how == "drained":
            assert {url for url in busy if url in w.proxy.membership.members} == busy
        go.set()
        await client.rest(head)
        for engine in new:
            await gone(w, engine.url)
        await nothing_is_left(w, names, *skip)
        for name in names:
            assert name not in w.page().decode()
        assert not [text for text in (await w.get("/ready")).json["details"] if "drained" in text]


async def _breaks_off(reply: Reply) -> None:
    reply.eof()


async def test_a_prefill_engine_stays_until_its_kv_was_read() -> None:
    """Its own legs are over: only the decode engine's is left, which reads its KV."""
    async with world(prefill=2) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.gate(go, w.decode[0].default))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await w.decode[0].asked()
        named = {url for one in w.workers for url in one.custodian.named()}
        (url,) = named & {engine.url for engine in w.prefill}
        assert w.proxy.engines[url].in_ledger.requests == 0
        w.proxy.membership.drain(url, "admin", removes=True)
        await asyncio.sleep(0.1)
        assert w.proxy.membership.state(url) is MemberState.DRAINING
        assert (await w.get("/ready")).json["details"] == [
            (
                f"prefill {url} is being drained (by admin): KV of it is still to be read or "
                f"released, for at most 300 s"
            )
        ]
        assert w.metric("pdproxy_node_state", node=url, state="draining") == 1
        go.set()
        assert (await client.answer()).text == TEXT
        await gone(w, url)
        assert w.books.endings == {"loaded": 1}


async def test_a_stream_that_is_too_late_goes_on_elsewhere() -> None:
    """At the deadline of the drain another engine goes on with it: the client sees all of it."""
    async with world(decode=2, facts={"hardware": Hardware(speed=0.5)}) as w:
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True, max_tokens=TOKENS))
        head = await client.head()
        first = await client.piece()
        (url,) = {one.url for one in w.proxy.ledger.engines if one.requests}
        w.proxy.membership.drain(url, "admin", seconds=0.0, removes=True)
        answer = await client.rest(head)
        assert replace(answer, body=first + answer.body).text == LONGER
        await gone(w, url)
        assert w.metric("pdproxy_deadline_total", wait="engine_drain") >= 1
        assert w.metric("pdproxy_continuations_total", result="continued") == 1


async def test_a_last_engine_that_is_drained_still_releases_kv() -> None:
    """No decode engine gets requests any more; one of them is asked to release what a client has
    left.
    """
    async with world(leaves=False) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, w.prefill[0].default))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await w.prefill[0].asked()
        w.proxy.membership.drain(w.decode[0].url, "admin")
        client.close()
        go.set()
        await until(lambda: w.books.endings == {"released": 1})
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        await until(lambda: w.proxy.membership.state(w.decode[0].url) is MemberState.DRAINED)
        w.proxy.membership.undrain(w.decode[0].url, "admin")
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


async def test_a_fleet_that_changes_under_streaming_clients() -> None:
    """Engines of 4P4D come and go at random: no request fails, no stream is cut, nothing is left of
    who went.
    """
    facts = {"hardware": Hardware(speed=5)}
    async with world(prefill=4, decode=4, facts=facts, adjust=_policy()) as w:
        chance, spare = (
            random.Random(21),
            [await started(w, role, **facts) for role in ("prefill", "decode") * 2],
        )
        members, went = w.proxy.membership, set()
        async with streaming(w, CLIENTS) as streams:
            for _ in range(CHANGES):
                await asyncio.sleep(chance.random() * 0.02)
                engine = chance.choice([*w.prefill, *w.decode])
                url, member = engine.url, members.members.get(engine.url)
                serving = [
                    one
                    for one in w.proxy.ledger.engines
                    if one.role.value == engine.role and one.available
                ]
                if member is None:
                    members.add(node(engine), "admin")
                elif member.drain is not None:
                    members.undrain(url, "admin") if chance.random() < 0.5 else members.drain(
                        url, "admin", removes=True
                    )
                elif len(serving) > 2 or w.proxy.engines[url].in_ledger not in serving:
                    if chance.random() < 0.6:
                        members.remove(url, member.source, at_once=chance.random() < 0.3)
                        went.add(url)
                    else:
                        members.drain(url, "admin")
                streams.look()
        assert streams.served > CLIENTS
        assert len(went) > 4
        for url, member in list(members.members.items()):
            if url in {engine.url for engine in spare}:
                members.remove(url, member.source)
        for engine in spare:
            await gone(w, engine.url)
        names = [engine.url.removeprefix("http://") for engine in spare]
        await nothing_is_left(w, names, w._recorder)
        assert SETTINGS in {member.source for member in members.members.values()} or went


async def test_many_engines_are_checked_together() -> None:
    """Adding hundreds takes a time that grows with their number. One that is wrong is named, and
    none of them comes.
    """
    async with world() as w:
        others = [
            ConfiguredEngine(url=f"http://127.0.0.1:{port}", role="decode") for port in range(1, 41)
        ]
        checked: list[int] = []
        check = w.proxy.setup.checked_all

        def checked_all(engines: Sequence[ConfiguredEngine]) -> list[ConfiguredEngine]:
            checked.append(len(engines))
            return check(engines)

        w.proxy.setup.checked_all = checked_all  # type: ignore[method-assign]
        wrong = msgspec.structs.replace(others[7], serves_whole=True)
        with pytest.raises(SettingsError, match=r"127\.0\.0\.1:8.*can't be added.*serves_whole"):
            w.proxy.membership.apply("test", [*others[:7], wrong, *others[8:]])
        assert len(w.proxy.membership.members) == 2
        twice = [*others[:3], msgspec.structs.replace(others[0], url="https://127.0.0.1:1")]
        with pytest.raises(SettingsError, match="is given twice"):
            w.proxy.membership.apply("test", twice)
        w.proxy.membership.apply("test", others)
        assert len(w.proxy.membership.members) == 42
        assert checked == [40, 4, 40]
        w.proxy.membership.apply("test", [])
