"""Engines that DNS names, in front of a name server of the tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pdproxy.cli.main import main
from pdproxy.fleet import membership, prober
from pdproxy.settings.dns import Dns
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import MASK, SettingsError
from pdproxy.settings.load import EngineFlag, Flag, load
from pdproxy.settings.schema import Settings
from tests.fakes.engine import FakeEngine
from tests.fakes.name_server import NameServer, name_server
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world
from tests.proxy.test_membership import gone, started, up

SERVICE = "_vllm._tcp.example"
URL = f"srv://{SERVICE}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)


def named(server: NameServer, *engines: ConfiguredEngine) -> Callable[[Settings], Settings]:
    """Settings with nodes that DNS names, and a server to ask, often."""

    def adjust(settings: Settings) -> Settings:
        pool = msgspec.structs.replace(settings.pool, nodes=(*settings.pool.nodes, *engines))
        dns = Dns(servers=(server.address,), min_ttl=0.02, max_ttl=0.05)
        return msgspec.structs.replace(settings, pools=(pool,), dns=dns)

    return adjust


def has(server: NameServer, *engines: FakeEngine, name: str = SERVICE) -> None:
    """Have the name stand for these engines."""
    texts = [f"0 0 {engine.url.rpartition(':')[2]} 127.0.0.1." for engine in engines]
    server.records[name, "SRV"] = (0, texts)


async def test_a_proxy_that_does_not_know_its_engines_yet_takes_no_requests() -> None:
    """Other proxies may know them. Once the source has answered, engines may be gone: this proxy
    takes requests, and refuses each with a reason.
    """
    node = ConfiguredEngine(url=URL, role="aggregated")
    async with (
        name_server() as server,
        world(prefill=0, decode=0, adjust=named(server, node)) as w,
    ):
        w.proxy.sources.start()
        await until(lambda: w.metric("pdproxy_dns_answers_total", result="failed"))
        answer = await w.get("/ready/proxy")
        assert (answer.status, answer.json["reason"]) == (
            503,
            f"starting: {URL} has not been answered yet",
        )
        new = await started(w, "aggregated")
        has(server, new)
        await until(lambda: new.url in w.proxy.membership.members)
        assert (await w.get("/ready/proxy")).status == 200
        w.proxy.sources.use([msgspec.structs.replace(w.proxy.settings.pool, nodes=())])
        await gone(w, new.url)
        assert (await w.get("/ready/proxy")).status == 200


async def test_engines_come_and_go_with_their_name() -> None:
    """They serve, are drained, and are forgotten; a server that fails changes nothing, and `/ready`
    names the source.
    """
    async with (
        name_server() as server,
        world(decode=1, adjust=named(server, ConfiguredEngine(url=URL, role="decode"))) as w,
    ):
        new = [await started(w, "decode") for _ in range(2)]
        has(server, *new)
        w.proxy.sources.start()
        for engine in new:
            await until(lambda: all(one.url in w.proxy.engines for one in new))
            await up(w, engine)
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert all(engine.requests for engine in new)
        assert w.metric("pdproxy_dns_engines", source=URL) == 2
        server.fault = "servfail"
        await until(lambda: w.metric("pdproxy_dns_answers_total", source=URL, result="failed"))
        details = (await w.get("/ready")).json["details"]
        assert [text for text in details if text.startswith(f"{URL}: the servers refuse")]
        assert all(engine.url in w.proxy.engines for engine in new)
        server.fault = ""
        has(server, new[0])
        await gone(w, new[1].url)
        assert new[0].url in w.proxy.engines
        has(server)
        await gone(w, new[0].url)
        await until(lambda: w.metric("pdproxy_dns_answers_total", source=URL, result="empty"))
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert w.metric("pdproxy_dns_age_seconds", source=URL) >= 0


async def test_a_pool_of_names_alone() -> None:
    """It is not ready before the first answer, and then serves."""
    async with (
        name_server() as server,
        world(
            0, 0, adjust=named(server, ConfiguredEngine(url=URL, role="aggregated")), probed=False
        ) as w,
    ):
        w.proxy.start()
        answer = await w.get("/ready")
        assert (answer.status, answer.json["state"]) == (503, "not_ready")
        engine = await _aggregated(w)
        has(server, engine)
        w.proxy.sources.start()
        await until(lambda: engine.url in w.proxy.engines)
        await up(w, engine)
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert (await w.get("/ready")).status == 200


async def _aggregated(w: World) -> FakeEngine:
    engine = FakeEngine("aggregated", w.books)
    await engine.listen()
    w.engines.append(engine)
    return engine


async def test_addresses_of_a_name() -> None:
    """One engine per address, at the port of the URL."""
    async with name_server() as server:
        engine = ConfiguredEngine(url="dns://engines.example:9", role="decode")
        server.records = {("engines.example", "A"): (0, ("127.0.0.8", "127.0.0.9"))}
        async with world(adjust=named(server, engine)) as w:
            w.proxy.sources.start()
            (source,) = w.proxy.sources.found
            wanted = {"http://127.0.0.8:9", "http://127.0.0.9:9"}
            await until(lambda: wanted <= set(w.proxy.membership.members))
            assert {w.proxy.membership.members[url].source for url in wanted} == {engine.url}
            assert source.shortcomings() == []


async def test_a_name_server_that_is_silent_holds_nothing_up() -> None:
    """The question ends at its deadline, which is counted; requests are served meanwhile."""
    async with name_server() as server:
        server.fault = "silent"
        adjust = named(server, ConfiguredEngine(url=URL, role="decode"))

        def soon(settings: Settings) -> Settings:
            settings = adjust(settings)
            return msgspec.structs.replace(
                settings, dns=msgspec.structs.replace(settings.dns, timeout=0.1)
            )

        async with world(adjust=soon) as w:
            w.proxy.sources.start()
            await until(lambda: w.metric("pdproxy_deadline_total", wait="dns"))
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
            details = (await w.get("/ready")).json["details"]
            assert f"{URL}: no answer in 0.1 s" in details[0]
            assert "no engine of it is known" in details[0]


# -- settings


def test_flags_and_files_name_them(tmp_path: Path) -> None:
    """They stand among the engines, and the settings are the same when they are printed and read
    again.
    """
    path = tmp_path / "x.yaml"
    path.write_text(
        "pools:\n- nodes:\n  - {url: 'DNS://Prefill.example:8200', role: prefill, api_key: "
        "hidden-key}\n"
    )
    settings = load(
        path, {}, (), [EngineFlag("decode", "srv://_vllm._tcp.x"), EngineFlag("decode", "a:1")]
    )
    urls = ["dns://prefill.example:8200", "srv://_vllm._tcp.x", "http://a:1"]
    assert [engine.url for engine in settings.pool.nodes] == urls
    assert [engine.url for engine in settings.pool.fixed_nodes] == urls[2:]
    assert [engine.url for engine in settings.pool.source_nodes] == urls[:2]
    from pdproxy.settings.dump import dump

    text = dump(settings)
    assert "hidden-key" not in text
    printed = tmp_path / "printed.yaml"
    printed.write_text(text.replace(MASK, "hidden-key"))
    assert load(printed, {}) == settings


def test_a_file_that_has_them_apart_is_read(tmp_path: Path) -> None:
    """As `pdproxy config print` wrote it before they stood among the engines. What is wrong there
    is named.
    """
    path = tmp_path / "x.yaml"
    engines = "nodes: [{url: 'http://a:1', role: decode}]"
    for text, urls in [
        (
            f"{{{engines}, dns_nodes: [{{url: 'dns://x:1', role: decode}}]}}",
            ["http://a:1", "dns://x:1"],
        ),
        ("{nodes: , dns_nodes: [{url: 'dns://x:1', role: decode}]}", ["dns://x:1"]),
        (f"{{{engines}, dns_nodes: []}}", ["http://a:1"]),
    ]:
        path.write_text(f"pools: [{text}]\n")
        assert [engine.url for engine in load(path, {}).pool.nodes] == urls
    for text, why in [
        (
            f"[{{{engines}, dns_nodes: [{{url: 'dns://x', role: decode}}]}}]",
            r"pools\[0\].nodes\[1\].url: \"dns://x\"",
        ),
        ("[{nodes: 7, dns_nodes: []}]", r"pools\[0\].nodes: expected a list"),
        (f"[{{{engines}, dns_nodes: 7}}]", "dns_nodes"),
        ("[7]", r"pools\[0\]: expected a mapping"),
    ]:
        path.write_text(f"pools: {text}\n")
        with pytest.raises(SettingsError, match=why):
            load(path, {})


def test_a_mistake_behind_a_name_has_its_place_in_the_list(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    first = "{url: 'http://p:1', role: prefill, facts: {tensor_parallel_size: 2}}"
    second = "{url: 'http://a:1', role: decode, facts: {tensor_parallel_size: 3}}"
    engines = f"{{url: 'dns://x:1', role: prefill}}, {first}, {second}"
    path.write_text(f"pools: [{{nodes: [{engines}]}}]\n")
    with pytest.raises(
        SettingsError, match=r"pools\[0\].nodes\[2\].facts.tensor_parallel_size: 3, but"
    ):
        load(path, {})


@pytest.mark.parametrize(
    ("engines", "flags", "why"),
    [
        ([("decode", "dns://x")], [], "expected the engines' port behind the name"),
        ([("decode", "dns://x:1"), ("decode", "dns://X:1")], [], "dns://x:1 is given twice"),
        ([("prefill", "dns://x:1")], [], "prefill engines, but no decode engine"),
        (
            [("decode", "dns://x:1")],
            [Flag("--connector", "pool.connector", "auto")],
            "name the connector",
        ),
        (
            [("any", "dns://x:1")],
            [Flag("--connector", "pool.connector", "lmcache-pd")],
            "has one role",
        ),
    ],
)
def test_wrong_names_are_found_at_the_start(
    engines: list[tuple[str, str]], flags: list[Flag], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        load(None, {}, flags, [EngineFlag(role, url) for role, url in engines])  # type: ignore[arg-type]


def test_an_engine_of_any_role_decides_the_placement() -> None:
    assert load(None, {}, (), [EngineFlag("any", "dns://x:1")]).pool.placement == "auto"


def test_commands_that_ask_engines_want_their_urls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--decode", "dns://x:1"]) == 2
    assert "dns://x:1: this command takes no engines that DNS names" in capsys.readouterr().err


async def test_a_decode_engine_names_its_prefill_engines() -> None:
    """Its sources are in their normal spelling from the start, or each answer would replace it."""
    async with name_server() as server:
        server.records = {("engines.example", "A"): (0, ("127.0.0.9",))}
        async with world() as w:
            url = w.prefill[0].url
            settings = load(
                None,
                {},
                (),
                [EngineFlag("prefill", url), EngineFlag("decode", "dns://engines.example:9")],
            )
            (engine,) = settings.pool.source_nodes
            w.proxy.settings = named(server, msgspec.structs.replace(engine, sources=(url,)))(
                w.proxy.settings
            )
            w.proxy.sources.start()
            (source,) = w.proxy.sources.found
            await until(lambda: source.counts["same"] >= 2)
            assert source.counts["changed"] == 1
            assert w.metric("pdproxy_member_changes_total", change="replaced") == 0
            await asyncio.sleep(0)
