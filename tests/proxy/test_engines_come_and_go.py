"""Engines that are added and removed while requests are served."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from pdproxy.fleet import prober
from pdproxy.observe.events import HandleEnded
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv import ReceiverSettings
from pdproxy.settings.tls import EngineTls
from tests.fakes import answers, scripts
from tests.fakes.client import Client, request
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.pool import pool
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world
from tests.proxy.test_membership import started

LONG_PROMPT = "def main(argv):\n    for name in argv:\n        print(name)\n" * 5


def have(w: World, engine: ConfiguredEngine) -> None:
    """Have an engine that serves at once."""
    w.proxy.membership.put(engine, "test", (), 0.0, None)


async def add(w: World, role: str = "decode") -> FakeEngine:
    """Start one more engine, add it, and wait until it is up."""
    engine = await started(w, role)
    have(w, ConfiguredEngine(url=engine.url, role=role))  # type: ignore[arg-type]
    await up(w, engine)
    return engine


async def up(w: World, engine: FakeEngine) -> None:
    """Wait until an engine is up."""
    await until(
        lambda: all(
            engine.url in one.engines and one.engines[engine.url].in_ledger.up for one in w.workers
        )
    )


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


async def test_a_decode_engine_comes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    """It gets requests once it has been probed; removed, it gets none, and the stream that flows
    from it ends well.
    """
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with world() as w:
        (first,) = w.decode
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        second = await add(w)
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(second.requests) == 2
        assert len(w.prefill[0].requests) == 5
        assert (await w.get("/ready")).json == {
            "ready": True,
            "state": "ok",
            "reason": None,
            "details": [],
        }
        assert w.metric("pdproxy_node_up", node=second.url, role="decode") == 1

        go = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.after_word(go, _rest))
        clients = [await w.client(), await w.client()]
        for client in clients:
            client.post(COMPLETIONS, completion(stream=True))
        heads = [await client.head() for client in clients]
        assert [await client.piece() for client in clients] == [WORD] * 2
        removed = w.proxy.membership.take_out(second.url)
        assert removed.in_ledger.requests == 1, "its stream flows"
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(second.requests) == 3
        page = w.page().decode()
        assert second.url not in page
        assert first.url in page
        go.set()
        for client, head in zip(clients, heads, strict=True):
            assert (await client.rest(head)).body == WORD + answers.end()
        await w.quiet()
        assert (removed.in_ledger.requests, removed.in_ledger.prompt_bytes) == (0, 0)
        await until(lambda: not removed.client._all)
        assert (await w.get("/ready")).json == {
            "ready": True,
            "state": "ok",
            "reason": None,
            "details": [],
        }
        await until(
            lambda: not [task for task in asyncio.all_tasks() if second.url in task.get_name()]
        )
        assert {(await w.ended(count)).outcome for count in range(1, 12)} == {"ok"}
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


async def test_removed_between_prefill_and_decode(caplog: pytest.LogCaptureFixture) -> None:
    """The request has its lease on the decode engine already, and is served there."""
    async with world(decode=2) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, w.prefill[0].default))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await w.prefill[0].asked()
        (chosen,) = [
            engine for engine in w.decode if w.proxy.engines[engine.url].in_ledger.requests
        ]
        # what is removed and idle is forgotten at the next change, what has a lease is not
        for _ in range(3):
            w.proxy.membership.take_out(chosen.url)
            other = await add(w)
            w.proxy.membership.take_out(other.url)
            have(w, ConfiguredEngine(url=chosen.url, role="decode"))
        w.proxy.membership.take_out(chosen.url)
        go.set()
        assert (await client.answer()).text == TEXT
        assert len(chosen.requests) == 1
        assert (await w.ended()).legs[0].decode == chosen.url
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_removed_and_gone_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its leg fails as any other, another engine serves the request, and the KV on the removed
    prefill engine is released.
    """
    async with world(prefill=2, decode=2) as w:
        go = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.gate(go, scripts.reset))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await until(lambda: any(engine.requests for engine in w.decode))
        first = next(engine for engine in w.decode if engine.requests)
        prefill = next(engine for engine in w.prefill if engine.requests)
        other = next(engine for engine in w.decode if engine is not first)
        other.scripts.clear()
        w.proxy.membership.take_out(first.url)
        w.proxy.membership.take_out(prefill.url)
        first.refuse()
        go.set()
        assert (await client.answer()).text == TEXT
        await w.quiet()
        assert w.metric("pdproxy_leg_failures_total", node="removed") == 1
        assert w.metric("pdproxy_leg_failures_total", node=first.url) == 0, (
            "it has no series of its own any more"
        )
        assert w.books.endings == {"released": 1, "loaded": 1}
        assert first.url not in repr((await w.get("/ready")).json)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_one_that_is_added_again_is_probed_again() -> None:
    """Nothing of its past counts: what was learned of it before may be wrong by now."""
    async with world(decode=2) as w:
        engine = w.decode[0]
        old = w.proxy.membership.take_out(engine.url)
        with pytest.raises(KeyError):
            w.proxy.membership.take_out(engine.url)
        have(w, ConfiguredEngine(url=engine.url, role="decode"))
        new = w.proxy.engines[engine.url]
        with pytest.raises(ValueError, match="is there already"):
            w.proxy.setup.add(ConfiguredEngine(url=engine.url, role="decode"))
        assert new is not old
        assert new.in_ledger.run_number != old.in_ledger.run_number
        assert not new.in_ledger.up
        await up(w, engine)
        w.proxy.membership.take_out(w.decode[1].url)
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(engine.requests) == 1


async def test_a_removed_engine_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probes end, also one that is under way, and its connections close."""
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)
    async with world(decode=2) as w:
        engine = w.decode[0]
        while not engine.requests:
            await w.ask(COMPLETIONS, completion())
        removed = w.proxy.engines[engine.url]
        assert removed.client._idle
        engine.admin["/health"] = scripts.stall
        w.proxy.prober.soon(removed)
        await until(
            lambda: any(one.path == "/health" and not one.over for one in engine.sim.journal.others)
        )
        w.proxy.membership.take_out(engine.url)
        w.proxy.prober.soon(removed)
        await until(lambda: not removed.client._all)
        count = len(engine.sim.journal.others)
        await asyncio.sleep(0.1)
        assert len(engine.sim.journal.others) == count
        assert engine.url not in w.page().decode()


async def test_the_last_decode_engine_is_removed() -> None:
    """Then it is not ready, until one is added."""
    async with world() as w:
        w.proxy.membership.take_out(w.decode[0].url)
        ready = await w.get("/ready")
        assert ready.status == 503
        assert "no decode or aggregated engine is up" in ready.json["reason"]
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        await add(w)
        assert (await w.get("/ready")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


async def _served(w: World) -> tuple[Client, FakeEngine]:
    """Have a decode engine work on an unstreamed request; return its client and the engine."""
    client = await w.client()
    client.post(COMPLETIONS, completion())
    await until(lambda: any(engine.requests for engine in w.decode))
    return client, next(engine for engine in w.decode if engine.requests)


@pytest.mark.parametrize("late", [False, True], ids=["refuses", "sends nothing"])
async def test_a_removed_engine_dies_while_it_serves_a_request(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leg ends as it would without the removal: long before the deadline of the request."""
    monkeypatch.setattr(prober, "MIN_GAP", 0.05)
    deadlines = {"between_tokens": 0.3, "first_token": 60.0, "total": 60.0}
    async with world(deadlines=deadlines, limits={"attempts": 1}, leaves=True) as w:
        w.decode[0].script(scripts.stall)
        client, engine = await _served(w)
        # only now: an engine that is late with its first probe would never get the request
        msgspec.structs.force_setattr(w.proxy.settings.deadlines, "probe", 0.1)
        w.proxy.membership.take_out(engine.url)
        if late:
            engine.admin["/health"] = scripts.stall
        else:
            engine.refuse()
        answer = await asyncio.wait_for(client.answer(), 20)
        assert answer.status == 504
        assert "has been down for 0.3 s" in str(answer.json)
        await until(
            lambda: not [task for task in asyncio.all_tasks() if engine.url in task.get_name()]
        )


async def test_an_engine_that_recovers_after_its_removal_keeps_its_legs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was down when it was removed, and answers its probes again."""
    monkeypatch.setattr(prober, "MIN_GAP", 0.05)
    async with world(deadlines={"between_tokens": 0.5}, limits={"attempts": 1}) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.gate(go, w.decode[0].default))
        client, engine = await _served(w)
        ledger_engine = w.proxy.engines[engine.url].in_ledger
        w.mark_down(engine, "overloaded", w.proxy.now())
        w.proxy.membership.take_out(engine.url)
        await until(lambda: ledger_engine.up)
        await asyncio.sleep(1.0)
        go.set()
        assert (await asyncio.wait_for(client.answer(), 20)).text == TEXT


@pytest.mark.parametrize("removed", [False, True], ids=["kept", "removed"])
async def test_kv_that_was_pushed_to_a_removed_engine_is_released(removed: bool) -> None:
    """Its client has left before all notices came: only that engine can release it."""
    async with pool("lmcache-pd") as pair:
        w = pair.world
        pair.p.faults.add("late_notice:delay=0.5,rate=1")
        client = await w.client()
        client.send(
            request("POST", COMPLETIONS, {"model": "tiny", "prompt": LONG_PROMPT, "max_tokens": 4})
        )
        await until(
            lambda: sum(n for one in w.workers for n, _ in one.custodian.snapshot().values())
        )
        client.close()
        await until(lambda: not any(engine.requests for engine in w.proxy.ledger.engines))
        if removed:
            w.proxy.membership.take_out(pair.d.url)
        await until(lambda: w.events(HandleEnded))
        assert [event.end for event in w.events(HandleEnded)] == ["released"]
        other = ConfiguredEngine(url="http://127.0.0.1:9", role="prefill")
        have(w, other)
        assert (pair.d.url in w.proxy.engines.known) is not removed
        w.proxy.membership.take_out(other.url)


async def test_an_engine_that_is_being_added_leaves_the_proxy_ready() -> None:
    """It stands in the details until it has answered its probe."""
    async with world() as w:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            have(w, ConfiguredEngine(url=url, role="decode"))
            ready = await w.get("/ready")
            assert (ready.status, ready.json["details"]) == (200, [f"decode {url}: not probed yet"])
            w.proxy.membership.take_out(url)


RECEIVER = ReceiverSettings(init_ports=(7300,), alloc_ports=(7400,))
ADDED = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (
            ConfiguredEngine(url=ADDED, role="decode"),
            r"receiver: connector lmcache-pd needs init_ports and alloc_ports",
        ),
        (
            ConfiguredEngine(
                url=ADDED,
                role="decode",
                receiver=ReceiverSettings(init_ports=(7300, 7301), alloc_ports=(7400,)),
            ),
            "2 init_ports, but 1 alloc_ports",
        ),
        (
            ConfiguredEngine(
                url=ADDED,
                role="decode",
                receiver=ReceiverSettings(init_ports=(7300,), alloc_ports=(7300,)),
            ),
            "port 7300 of 127.0.0.1 is given twice",
        ),
        (
            ConfiguredEngine(url=ADDED, role="prefill", receiver=RECEIVER),
            "only a decode engine of connector lmcache-pd",
        ),
        (
            ConfiguredEngine(
                url=ADDED, role="decode", receiver=RECEIVER, sources=("http://127.0.0.1:8",)
            ),
            "http://127.0.0.1:8 is no prefill engine of this pool",
        ),
        (
            ConfiguredEngine(url=ADDED, role="decoder"),  # type: ignore[arg-type]
            "role: expected prefill or decode or aggregated",
        ),
        (ConfiguredEngine(url="http://127.0.0.1:9/v1", role="prefill"), "nothing may follow"),
        (
            ConfiguredEngine(url="http://u:secret@127.0.0.1:9", role="prefill"),
            "user and password aren't supported",
        ),
        (
            ConfiguredEngine(url=ADDED, role="prefill", api_key="a", api_key_file="b"),
            "exclude each other",
        ),
    ],
)
async def test_an_engine_that_the_settings_would_refuse_is_not_added(
    engine: ConfiguredEngine, why: str
) -> None:
    """The error names the engine and what is wrong, and nothing has changed."""
    async with pool("lmcache-pd") as pair:
        proxy = pair.world.proxy
        before = (
            dict(proxy.engines),
            dict(proxy.engines.known),
            proxy.ledger.engines,
            repr(proxy.credentials),
        )
        with pytest.raises(SettingsError, match=why) as raised:
            proxy.setup.add(engine)
        assert "can't be added" in str(raised.value)
        assert "secret" not in str(raised.value)
        assert (
            dict(proxy.engines),
            dict(proxy.engines.known),
            proxy.ledger.engines,
            repr(proxy.credentials),
        ) == before


async def test_receiver_ports_of_engines_that_are_there_are_taken() -> None:
    """An engine that is removed frees them; a URL is written in its normal spelling."""
    async with pool("lmcache-pd") as pair:
        setup = pair.world.proxy.setup
        (taken,) = [
            engine.receiver
            for engine in pair.world.proxy.settings.pool.nodes
            if engine.role == "decode"
        ]
        engine = ConfiguredEngine(url="http://LOCALHOST:9/", role="decode", receiver=taken)
        here = msgspec.structs.replace(taken, host="127.0.0.1")
        with pytest.raises(SettingsError, match="is given twice"):
            setup.add(msgspec.structs.replace(engine, receiver=here))
        setup.remove(pair.d.url)
        assert setup.add(msgspec.structs.replace(engine, receiver=here)).url == "http://localhost:9"
        with pytest.raises(SettingsError, match="is given twice"):
            setup.add(engine)
        setup.remove("http://localhost:9")


async def test_an_engine_whose_files_are_wrong_leaves_no_file_behind(tmp_path: Path) -> None:
    """A key that was read is not checked any more if the certificates can't be used, or if the
    client can't be made.
    """
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with world() as w:
        setup, credentials = w.proxy.setup, w.proxy.credentials
        before = repr(credentials)
        tls = EngineTls(ca=str(tmp_path / "nothing"))
        with pytest.raises(SettingsError):
            setup.add(
                ConfiguredEngine(
                    url="https://127.0.0.1:9", role="decode", api_key_file=str(key), tls=tls
                )
            )
        assert repr(credentials) == before

        def fail(*_: object, **__: object) -> NoReturn:
            raise OSError("no client")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "_client", fail)
            with pytest.raises(OSError, match="no client"):
                setup.add(ConfiguredEngine(url=ADDED, role="decode", api_key_file=str(key)))
        assert repr(credentials) == before
        key.unlink()
        credentials.look()
        credentials.look()
        assert credentials.shortcomings() == []
