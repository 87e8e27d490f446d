"""Two workers in one event loop: engines that come and go by the admin API under clients, and what
one of two refuses.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from pdproxy.app.compose import Proxy
from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet import membership, prober
from pdproxy.fleet.entries import engine_id
from pdproxy.fleet.membership import ADMIN
from pdproxy.settings.engines import ConfiguredEngine
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


async def test_an_engine_that_one_worker_refuses_comes_to_none() -> None:
    """It has had it by a name with other settings; the answer says which worker, and why."""
    async with world() as w, admin(w) as api:
        assert len(w.workers) == 2
        new = await started(w, "decode")
        name = "dns://decode:1"
        settings = ConfiguredEngine(url=new.url, role="decode", labels={"a": "b"})
        w.workers[1].membership.add(settings, name)
        for _ in range(4):
            refused = await api.post("/engines", fields(new))
            assert (refused.status, refused.json["error"]["owner"]) == (409, name)
            assert (
                f"{new.url} was added by {name}, with other settings"
                in refused.json["error"]["message"]
            )
            await until(lambda: _in(w, new) == [False, True])
        w.workers[1].membership.remove(new.url, name, at_once=True)
        assert (await api.post("/engines", fields(new))).status == 201
        assert _in(w, new) == [True, True]
        w.workers[1].membership.add(ConfiguredEngine(url=new.url, role="decode"), name)
        given_up = await api.delete(f"/engines/{engine_id(new.url)}?at_once=true")
        assert given_up.status == 200
        assert _in(w, new) == [False, True]


async def test_an_engine_that_one_worker_wanted_already_stays_there() -> None:
    """A refusal takes back what the change has done, and nothing else."""
    async with world() as w, admin(w) as api:
        new = await started(w, "decode")
        engine, name = ConfiguredEngine(url=new.url, role="decode"), "dns://decode:1"
        w.workers[0].membership.add(engine, name)
        w.workers[1].membership.add(
            ConfiguredEngine(url=new.url, role="decode", labels={"a": "b"}), "other"
        )
        assert (await api.post("/engines", fields(new))).status == 409
        await until(lambda: not w.workers[0].membership.members[new.url].heirs)
        assert w.workers[0].membership.members[new.url].source == name
        assert w.workers[0].membership.members[new.url].drain is None


async def test_an_engine_is_gone_once_it_is_gone_in_all() -> None:
    """One worker still waits for the release of KV there: until then the engine is shown, and can
    be had again.
    """
    async with world() as w, admin(w) as api:
        new = await started(w, "decode")
        await api.post("/engines", fields(new))
        held = {new.url}
        w.workers[1].engines.keep_known(lambda: held)
        path = f"/engines/{engine_id(new.url)}"
        assert (await api.delete(path)).json["result"] == "removing"
        await until(lambda: _in(w, new) == [False, True])
        for _ in range(4):
            shown = await api.get(path)
            assert (shown["state"], shown["drain"]["waits_for"]) == ("draining", "kv")
            assert new.url in {one["url"] for one in (await api.get("/engines"))["engines"]}
            assert new.url in (await api.ask("GET", "/list_workers")).json["urls"]
        for _ in range(4):
            again = await api.post("/engines", fields(new))
            assert (again.status, again.json["result"]) == (200, "serving_again")
            assert (await api.delete(path)).json["result"] == "removing"
            await until(lambda: _in(w, new) == [False, True])
        held.clear()
        await until(lambda: _in(w, new) == [False, False])
        assert (await api.ask("GET", BASE + path)).status == 404


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
        await asyncio.sleep(0)  # callbacks of tasks that are done run in the next turn
        names = [url.removeprefix("http://") for url in urls]
        kept = (w._recorder,)
        assert [found for worker in w.workers for found in remains(worker, names, kept)] == []
        assert ADMIN not in {
            one.source for worker in w.workers for one in worker.membership.members.values()
        }
