"""Two workers in one event loop: engines come and go by the admin API under clients, and what the
first worker decides of them the other one follows.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet import membership, prober
from pdproxy.fleet.entries import engine_id
from pdproxy.fleet.membership import ADMIN, SETTINGS
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.workers import members
from pdproxy.workers.audit import WorkerAuditor
from tests.fakes import several
from tests.fakes.admin import BASE, admin
from tests.fakes.engine import FakeEngine
from tests.fakes.remains import remains
from tests.fakes.streams import streaming
from tests.fakes.world import World, until, world
from tests.proxy.test_admin import fields
from tests.proxy.test_membership import CHANGES, CLIENTS, started


@pytest.fixture(autouse=True)
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "WORKERS", 2)
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)


def _in(w: World, engine: FakeEngine) -> list[bool]:
    return [engine.url in worker.membership.members for worker in w.workers]


def _drained(worker: Proxy) -> set[str]:
    return {url for url, member in worker.membership.members.items() if member.drain is not None}


async def test_an_engine_that_drains_stays_until_no_worker_needs_it() -> None:
    """A worker still waits for the release of KV there: until then the engine is shown, and can be
    had again.
    """
    async with world() as w, admin(w) as api:
        new = await started(w, "decode")
        await api.post("/engines", fields(new))
        await until(lambda: _in(w, new) == [True, True])
        held = {new.url}
        w.workers[1].engines.keep_known(lambda: held)
        path = f"/engines/{engine_id(new.url)}"
        for _ in range(4):
            assert (await api.delete(path)).json["result"] == "removing"
            await asyncio.sleep(20 * membership.LOOK)
            shown = await api.get(path)
            assert (shown["state"], shown["drain"]["waits_for"]) == ("draining", "kv")
            assert new.url in {one["url"] for one in (await api.get("/engines"))["engines"]}
            assert new.url in (await api.ask("GET", "/list_workers")).json["urls"]
            assert _drained(w.workers[1]) == {new.url}
            again = await api.post("/engines", fields(new))
            assert (again.status, again.json["result"]) == (200, "serving_again")
            await until(lambda: not _drained(w.workers[1]))
        await api.delete(path)
        held.clear()
        await until(lambda: _in(w, new) == [False, False])
        assert (await api.ask("GET", BASE + path)).status == 404


async def test_a_worker_that_has_ended_needs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one has got its KV by then."""
    monkeypatch.setattr(members, "HEIRS", 0.2)
    async with world() as w, admin(w) as api:
        new = await started(w, "decode")
        await api.post("/engines", fields(new))
        await until(lambda: _in(w, new) == [True, True])
        w.workers[1].engines.keep_known(lambda: {new.url})
        await api.delete(f"/engines/{engine_id(new.url)}")
        await until(lambda: _drained(w.workers[1]) == {new.url})
        await asyncio.sleep(20 * membership.LOOK)
        began = time.monotonic()
        w.workers[1].share._choosing.link.close()  # type: ignore[union-attr]
        await until(lambda: new.url not in w.proxy.membership.members)
        assert time.monotonic() - began >= members.HEIRS


async def test_a_worker_has_an_engine_as_it_was_decided() -> None:
    """With other settings it serves on, and one that went and came again at once is another one."""
    async with world(decode=2) as w:
        first, second = (one.membership for one in w.workers)
        url = w.decode[0].url
        engine = w.workers[1].engines[url]
        named = msgspec.structs.replace(first.members[url].settings, labels={"rack": "7"})
        others = [one.settings for one in first.members.values() if one.url != url]
        first.apply(SETTINGS, [named, *others])
        await until(lambda: second.members[url].settings.labels == {"rack": "7"})
        assert w.workers[1].engines[url] is not engine
        assert w.workers[1].engines[url].in_ledger.up
        engine = w.workers[1].engines[url]
        first.remove(url, SETTINGS, at_once=True)
        first.add(named, ADMIN)
        await until(lambda: w.workers[1].engines[url] is not engine)
        assert second.members[url].source == ADMIN
        assert not w.workers[1].engines[url].in_ledger.up, "it was not probed yet"
        await until(lambda: w.workers[1].engines[url].in_ledger.up)


async def test_an_engine_that_a_worker_can_not_have(tmp_path: Path) -> None:
    """Its key file can't be read there: `/ready` says so, and it comes once the file is there."""
    key = tmp_path / "key"
    key.write_text("secret")
    async with world() as w:
        new = await started(w, "decode")
        w.proxy.membership.add(
            ConfiguredEngine(url=new.url, role="decode", api_key_file=str(key)), ADMIN
        )
        key.unlink()
        await until(lambda: w.workers[1].share.members.shortcomings())  # type: ignore[union-attr]
        assert _in(w, new) == [True, False]
        details = (await w.get("/ready")).json["details"]
        assert any(f"{new.url} can't be used: " in one for one in details), details
        key.write_text("secret")
        await until(lambda: _in(w, new) == [True, True])
        assert not w.workers[1].share.members.shortcomings()  # type: ignore[union-attr]
        w.proxy.membership.remove(new.url, ADMIN, at_once=True)


async def test_a_fleet_that_changes_by_two_workers_under_streaming_clients() -> None:
    """As with one: no request fails, no stream is cut, both workers have the same engines, and
    nothing is left of who went.
    """
    facts = {"hardware": Hardware(speed=5)}
    async with world(prefill=3, decode=3, facts=facts) as w, admin(w) as api:
        chance, spare = (
            random.Random(23),
            [await started(w, role, **facts) for role in ("prefill", "decode") * 2],
        )
        went, statuses = set(), set()

        async def operate(engine: FakeEngine) -> None:
            for _ in range(CHANGES // len(spare)):
                await change(engine)

        async def change(engine: FakeEngine) -> None:
            await asyncio.sleep(chance.random() * 0.02)
            path, member = (
                f"/engines/{engine_id(engine.url)}",
                w.proxy.membership.members.get(engine.url),
            )
            if member is None:
                answer = await api.post("/engines", fields(engine))
            elif member.drain is not None and chance.random() < 0.5:
                again = ("/engines", fields(engine)) if member.leaves else (f"{path}/undrain",)
                answer = await api.post(*again)
            elif chance.random() < 0.6:
                answer = await api.delete(f"{path}?at_once={str(chance.random() < 0.3).lower()}")
                went.add(engine.url)
            else:
                answer = await api.post(f"{path}/drain")
            statuses.add(answer.status)
            assert answer.status in (200, 201, 202, 404, 409), answer.body
            streams.look()

        async with streaming(w, CLIENTS) as streams:
            await asyncio.gather(*(operate(engine) for engine in spare))
        assert streams.served > CLIENTS
        assert {200, 201, 202} <= statuses
        assert len(went) == 4
        await until(lambda: all(_in(w, engine) in ([True] * 2, [False] * 2) for engine in spare))
        await until(lambda: _drained(w.workers[0]) == _drained(w.workers[1]))
        for engine in spare:
            if any(_in(w, engine)):
                assert (await api.delete(f"/engines/{engine_id(engine.url)}")).status == 202
        await until(lambda: not any(any(_in(w, engine)) for engine in spare))
        await until(
            lambda: (
                not any(one.url in worker.engines.known for one in spare for worker in w.workers)
            )
        )
        urls = [engine.url for engine in spare]
        await until(
            lambda: (
                not [
                    task
                    for task in asyncio.all_tasks()
                    if any(url in task.get_name() for url in urls)
                ]
            )
        )
        for worker in w.workers:
            worker.share._shown.report()  # type: ignore[union-attr]  # the parent keeps the last one of each
        auditor = w.workers[1].pools[0].resources.auditor
        assert isinstance(auditor, WorkerAuditor)
        for _ in range(2):  # what was not told yet is kept for the next audit
            auditor.changes()
        await asyncio.sleep(0)  # callbacks of tasks that are done run in the next turn
        names = [url.removeprefix("http://") for url in urls]
        kept = (w._recorder,)
        assert [found for worker in w.workers for found in remains(worker, names, kept)] == []
        assert ADMIN not in {
            one.source for worker in w.workers for one in worker.membership.members.values()
        }
