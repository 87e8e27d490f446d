"""A proxy that chooses by prefixes, before simulated engines that publish KV events, or do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pdproxy.app.compose import Proxy
from pdproxy.app.tokens import TRANSFORMERS, Library
from pdproxy.scheduling.prefix.knowledge import Knowledge
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Probes
from pdproxy.settings.keys import Auth
from pdproxy.settings.kv import KvEvents, Prefixes
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import KvEventsConfig
from pdproxy_lab.sim.server import SimServer
from tests.fakes.recorder import Recorder
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import DEADLINES, World, _serve, until
from tests.proxy.kv_events import ANY, facts


class Known:
    """A world, its engines, and what its proxy knows of their caches. `ttl`: seconds for which it
    believes what it has only sent, 0: longer than a test takes.
    """

    def __init__(self, world: World, sims: Sequence[SimServer], ttl: float = 0.0) -> None:
        self.ttl = ttl
        self.world = world
        self.sims = list(sims)

    @property
    def knowledge(self) -> Knowledge:
        """What the proxy knows."""
        assert self.world.proxy.prefixes is not None
        return self.world.proxy.prefixes.knowledge

    def predictions(self, result: str, basis: str = "events") -> int:
        """How many predictions were exact, too_high or too_low."""
        return int(
            self.world.metric("pdproxy_prefix_predictions_total", basis=basis, result=result)
        )

    def all(self, basis: str = "events") -> tuple[int, int, int]:
        """How many were exact, too high and too low."""
        return (
            self.predictions("exact", basis),
            self.predictions("too_high", basis),
            self.predictions("too_low", basis),
        )

    async def ask(
        self,
        prompt: object,
        path: str = "/v1/completions",
        *,
        key: str | None = None,
        **fields: Any,
    ) -> int:
        """Send a prompt, with a client's key. Return the number of the engine that served it."""
        before = [sim.engine.stats.prompt_tokens for sim in self.sims]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        if path != "/v1/completions":
            body["messages"] = body.pop("prompt")
        headers = [] if key is None else [("authorization", f"Bearer {key}")]
        answer = await self.world.ask(path, body, headers)
        assert answer.status == 200, answer.body
        return next(
            at for at, sim in enumerate(self.sims) if sim.engine.stats.prompt_tokens != before[at]
        )

    async def settled(self) -> None:
        """Wait until all events that engines have sent are in the index: those of a step are sent
        before its tokens. And until what was only sent is believed no more.
        """
        await asyncio.sleep(2 * self.ttl)  # it is held for less than twice as long
        await until(lambda: all(map(self._has_all, self.world.workers)))

    def _has_all(self, worker: Proxy) -> bool:
        if worker.kv_events is None:
            return True
        sources = worker.kv_events.sources

        def of(sim: SimServer) -> bool:
            received = sum(
                count for (url, _), count in sources.counts.messages.items() if url == sim.url
            )
            return received >= sum(rank.counts["sent"] for rank in sim.engine.kv_events.ranks)

        return not sources._feed.bytes and all(map(of, self.sims))


@asynccontextmanager
async def knowing(
    count: int = 2,
    config: KvEventsConfig | None = ANY,
    *,
    role: str = "aggregated",
    prefixes: Mapping[str, Any] | None = None,
    policy: PoolPolicy | None = None,
    tokenizer: SimTokenizer | None = None,
    connected: bool = True,
    auth: Auth | None = None,
    **more: Any,
) -> AsyncIterator[Known]:
    """Run engines and a proxy. `config`: how engines publish, None: they don't. `more`: their
    facts.

    `connected`: wait until their events come.
    """
    async with AsyncExitStack() as stack:
        made = facts(config, **{"enable_prompt_tokens_details": True, "model": "tiny", **more})
        sims = [
            await stack.enter_async_context(SimServer(made, chance=number))
            for number in range(1, count + 1)
        ]
        settings = Settings(
            auth=auth or Auth(),
            pools=(
                Pool(
                    nodes=tuple(ConfiguredEngine(url=sim.url, role=role) for sim in sims),  # type: ignore[arg-type]
                    kv_events=KvEvents(enabled=config is not None),
                    prefixes=Prefixes(**(prefixes or {})),
                    policy=policy or PoolPolicy(prefill="prefix", decode="prefix"),
                    tokenize="always" if tokenizer and tokenizer.first is None else "auto",
                    tokenizer="model" if tokenizer is not None else None,
                ),
            ),
            deadlines=DEADLINES,
            probes=Probes(interval=3600, scrape_interval=3600),
        )
        library = TRANSFORMERS if tokenizer is None else Shelf(model=tokenizer)
        async with proxy_before(settings, library) as world:
            if config is not None and connected:
                await until(
                    lambda: world.metric("pdproxy_kv_event_sources", state="connected") == count
                )
                replays = "pdproxy_kv_event_replays_total"
                await until(
                    lambda: (
                        not config.replay_endpoint
                        or world.metric(replays, result="complete") >= count
                    )
                )
            ttl = (prefixes or {}).get("ttl", 0.0)
            yield Known(world, sims, ttl if ttl < 1 else 0.0)


@asynccontextmanager
async def proxy_before(settings: Settings, library: Library = TRANSFORMERS) -> AsyncIterator[World]:
    """Run a proxy whose engines are up."""
    recorder = Recorder()
    proxy = Proxy.build(settings, library)
    proxy.observers.add(recorder)
    world = World(proxy, None, (), recorder)  # type: ignore[arg-type]
    proxy.start()
    world.servers = [await _serve(proxy, world)]
    try:
        await until(lambda: all(engine.up for engine in proxy.ledger.engines))
        yield world
        await until(lambda: not world.busy())
    finally:
        await world.disconnect()
        await proxy.custodian.settle(0)
        await proxy.stop()
