"""The file of the settings, which is followed while requests are served."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import pytest

from pdproxy.app.live import LiveSettings
from pdproxy.app.reloading import SettingsSource
from pdproxy.fleet import membership
from pdproxy.fleet.member import MemberState
from pdproxy.observe.formats import make_formatter
from pdproxy.observe.lines import LineWriter
from pdproxy.observe.logs import Log
from pdproxy.settings.changes import changes
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import load
from pdproxy.settings.pools import PoolPolicy
from tests.fakes import answers, scripts
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.followed import followed
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, completion, until, world
from tests.proxy.test_membership import gone, started, up


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)


async def test_the_file_of_the_settings_is_followed(tmp_path: Path) -> None:
    """An engine that is no longer in it is drained: its stream ends well. Another one takes its
    place.
    """
    path = tmp_path / "pdproxy.yaml"

    def write(*engines: FakeEngine) -> None:
        rows = "".join(f"  - {{url: {one.url}, role: {one.role}}}\n" for one in engines)
        path.write_text(f"pools:\n- nodes:\n{rows}")

    async with world(decode=2) as w:
        write(*w.engines)
        source = SettingsSource(load(path, {}), lambda: load(path, {}), [path])
        log = Log(LineWriter(io.StringIO(), str), make_formatter("text"), shows_requests=True)
        reloading = followed(w, source, log)
        go = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.after_word(go, _rest))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert await client.piece() == WORD
        leaves, stays = sorted(w.decode, key=lambda one: not one.requests)
        stays.scripts.clear()
        new = await started(w, "decode")
        write(w.prefill[0], stays, new)
        await reloading.look(asked=True)
        await up(w, new)
        assert w.proxy.membership.state(leaves.url) is MemberState.DRAINING
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(leaves.requests) == 1
        go.set()
        assert (await client.rest(head)).body == WORD + answers.end()
        await gone(w, leaves.url)
        assert (await w.get("/ready")).json["details"] == []
        path.write_text("pools: [")
        await reloading.look(asked=True)
        ready = await w.get("/ready")
        assert ready.status == 200
        assert "can't be read again" in ready.json["details"][0]
        assert w.metric("pdproxy_settings_reloads_total", result="applied") == 1
        assert w.metric("pdproxy_settings_reloads_total", result="refused") == 1
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        log.close()


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


async def test_a_key_file_that_was_moved_takes_no_engine_away(tmp_path: Path) -> None:
    """The file names the new place wrongly, and the old one is gone: the engine serves on with the
    key that it has.
    """
    key = tmp_path / "key"
    key.write_text("secret")
    async with world(decode=1) as w:
        ledger_engines = [member.settings for member in w.proxy.membership.members.values()]
        keyed = [
            msgspec.structs.replace(engine, api_key_file=str(key)) for engine in ledger_engines
        ]
        w.proxy.membership.apply("settings", keyed)
        engines = dict(w.proxy.engines)
        key.unlink()
        wrong = [
            msgspec.structs.replace(engine, api_key_file=str(tmp_path / "kye"))
            for engine in ledger_engines
        ]
        with pytest.raises(SettingsError, match="can't be read"):
            w.proxy.membership.apply("settings", wrong)
        assert dict(w.proxy.engines) == engines
        assert list(w.proxy.membership.members) == list(engines)
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert (await w.get("/ready")).status == 200


async def test_other_settings_are_followed(tmp_path: Path) -> None:
    """Keys and limits are those of the file with the next request, also on a connection that is
    open.
    """
    path = tmp_path / "pdproxy.yaml"
    async with world(decode=1, auth={"api_keys": ("one",)}) as w:
        rows = "".join(f"  - {{url: {one.url}, role: {one.role}}}\n" for one in w.engines)

        def write(text: str) -> None:
            path.write_text(f"pools:\n- nodes:\n{rows}{text}")

        write("auth: {api_keys: [one]}\n")
        source = SettingsSource(load(path, {}), lambda: load(path, {}), [path])
        log = Log(LineWriter(io.StringIO(), str), make_formatter("text"), shows_requests=True)
        reloading = followed(w, source, log)

        async def status(key: str, size: int = 10) -> int:
            headers = [("authorization", f"Bearer {key}")]
            return (await w.ask(COMPLETIONS, completion(prompt="x" * size), headers)).status

        assert [await status("one"), await status("two")] == [200, 401]
        write(
            "auth: {api_keys: [two]}\nlimits: {max_body_bytes: 1000}\ncontinuations: {parsed: "
            "'off'}\n"
        )
        await reloading.look(asked=True)
        assert [await status("one"), await status("two"), await status("two", 2000)] == [
            401,
            200,
            413,
        ]
        details = (await w.get("/ready")).json["details"]
        assert details == ["these settings have changed, and need a restart: continuations.parsed"]
        write("limits: {max_body_bytes: 5000}\n")
        await reloading.look(asked=True)
        assert [await status("two"), await status("two", 2000)] == [200, 200], (
            "the proxy is not opened to everybody"
        )
        details = (await w.get("/ready")).json["details"]
        assert details == ["these settings have changed, and need a restart: auth.api_keys"]
        write("auth: {api_keys: [three]}\nlimits: {max_body_bytes: 1}\ndeadlines: {total: soon}\n")
        await reloading.look(asked=True)
        assert [await status("two"), await status("three")] == [200, 401], (
            "a file with a mistake changes nothing"
        )
        log.close()


async def test_policies_change_while_streams_are_open() -> None:
    """The new one sees the load that is there; what began under another one ends well, and nothing
    is counted twice.
    """
    async with world(decode=2) as w:
        old = w.proxy.settings
        live = LiveSettings(w.proxy, lambda _: None)
        go = asyncio.Event()
        streams = []
        for engine in w.decode:
            engine.script(scripts.after_word(go, _rest))
        for _ in w.decode:
            client = await w.client()
            client.post(COMPLETIONS, completion(stream=True))
            streams.append((client, await client.head()))
            assert await client.piece() == WORD
        for name in ("round_robin", "random", "power_of_two", "session", "least_load"):
            policy = PoolPolicy(
                placement="split", prefill=name, decode=name, session_header="X-Chat"
            )
            new = msgspec.structs.replace(
                old, pools=(msgspec.structs.replace(old.pool, policy=policy),)
            )
            found = changes(old, new)
            assert found.restart == ()
            old = found.used
            live.use(w.proxy.settings, old)
            before = [len(engine.requests) for engine in w.decode]
            for n in range(4):
                answer = await w.ask(COMPLETIONS, completion(), [("x-chat", str(n))])
                assert answer.text == TEXT
            served = [
                len(engine.requests) - count for engine, count in zip(w.decode, before, strict=True)
            ]
            assert sum(served) == 4
            if name == "round_robin":
                assert served == [2, 2]
            assert w.proxy.service.session_header == ("X-Chat" if name == "session" else None)
        go.set()
        for client, head in streams:
            assert (await client.rest(head)).body == WORD + answers.end()
        await until(
            lambda: not any(ledger_engine.requests for ledger_engine in w.proxy.ledger.engines)
        )
