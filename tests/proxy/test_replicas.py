"""Replicas: what engines report of others' requests is seen by choices, and DNS says how many
proxies there are.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
import pytest

from pdproxy.app.replicas import follow_replicas
from pdproxy.scheduling.auto.replica import ReplicaAuto
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.settings.dns import Dns, ReplicaSettings
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy.upstream.metrics_page import Scrape
from tests.fakes.name_server import name_server
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

NAME = "replicas.example"


def adjusted(
    count: int | Literal["auto"], server: str = "", **others: Any
) -> Callable[[Settings], Settings]:
    """Settings of one of several replicas."""

    def adjust(settings: Settings) -> Settings:
        replicas = ReplicaSettings(count=count, name=NAME if count == "auto" else None)
        dns = Dns(servers=(server,) if server else (), min_ttl=0.02, max_ttl=0.05)
        return msgspec.structs.replace(settings, replicas=replicas, dns=dns, **others)

    return adjust


def reports(w: World, counts: dict[str, float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines report so many requests, one of which runs."""
    ask = w.proxy.admin.scrape

    async def scrape(url: str) -> Scrape:
        count = counts[url]
        return dataclasses.replace(
            await ask(url), running=1.0, waiting=None if count is None else count - 1
        )

    monkeypatch.setattr(w.proxy.admin, "scrape", scrape)


async def probed(w: World) -> None:
    for engine in w.proxy.engines.values():
        await w.proxy.prober.probe(engine, scrape=True)


async def test_requests_go_where_others_send_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics and what operators see of an engine name our own requests apart."""
    async with world(prefill=0, decode=0, aggregated=3, adjust=adjusted(2)) as w:
        follow_replicas(w.proxy)
        busy, free, silent = (engine.url for engine in w.aggregated)
        reports(w, {busy: 20, free: 1, silent: 9}, monkeypatch)
        await probed(w)
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert [len(engine.requests) for engine in w.aggregated] == [0, 6, 0]
        assert w.metric("pdproxy_replicas") == 2
        assert w.metric("pdproxy_node_other_requests", node=busy) == 20
        assert w.metric("pdproxy_node_inflight", node=busy) == 0
        reports(w, {busy: 20, free: 20, silent: None}, monkeypatch)
        await probed(w)
        assert w.metric("pdproxy_node_other_requests", node=silent) == 0
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert [len(engine.requests) for engine in w.aggregated] == [0, 6, 1]


async def test_an_engine_with_others_requests_is_drained_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(prefill=0, decode=0, aggregated=2, adjust=adjusted(2)) as w:
        reports(w, {engine.url: 20 for engine in w.aggregated}, monkeypatch)
        await probed(w)
        gone = w.aggregated[0].url
        w.proxy.membership.remove(gone, "settings")
        await until(lambda: gone not in w.proxy.engines)
        assert [ledger_engine.url for ledger_engine in w.proxy.ledger.engines] == [
            w.aggregated[1].url
        ]
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


async def test_dns_says_how_many_there_are() -> None:
    """An engine's bound of requests is divided by them. A server that fails changes nothing, and
    `/ready` says so.
    """
    async with (
        name_server() as server,
        world(
            decode=1, limits={"engine_requests": 8}, adjust=adjusted("auto", server.address)
        ) as w,
    ):
        engine = w.proxy.engines[w.decode[0].url].in_ledger
        assert w.metric("pdproxy_capacity", node=engine.url) == engine.window == 8
        server.records[NAME, "A"] = (0, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"])
        follow_replicas(w.proxy)
        await until(lambda: w.metric("pdproxy_replicas") == 4)
        assert engine.window == 2
        assert isinstance(w.proxy.ledger, ReplicaLedger)
        server.fault = "servfail"

        async def details() -> list[str]:
            return [
                text
                for text in (await w.get("/ready")).json["details"]
                if text.startswith("replicas.name")
            ]

        async with asyncio.timeout(60):
            while not await details():
                await asyncio.sleep(0.01)
        assert (await details())[0].startswith(f"replicas.name {NAME}: the servers refuse")
        assert w.metric("pdproxy_replicas") == 4
        server.fault = ""
        server.records[NAME, "A"] = (0, ["10.0.0.1"])
        await until(lambda: engine.window == 8)
        assert await details() == []
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


async def test_one_proxy_has_a_plain_ledger() -> None:
    async with world(decode=1) as w:
        assert type(w.proxy.ledger) is Ledger
        assert follow_replicas(w.proxy) is None
        assert "pdproxy_node_other_requests{" not in w.proxy.metrics.page().decode()


async def test_the_placement_knows_of_replicas() -> None:
    placed = partial(msgspec.structs.replace, policy=PoolPolicy(placement="auto"))

    def adjust(settings: Settings) -> Settings:
        return adjusted(3)(msgspec.structs.replace(settings, pools=(placed(settings.pool),)))

    async with world(prefill=0, decode=0, anything=2, adjust=adjust) as w:
        assert isinstance(w.proxy.ledger.placement, ReplicaAuto)
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
