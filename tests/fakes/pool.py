"""The real proxy in front of simulated engines of any connector, beside a plain engine that answers
as one engine would.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pdproxy.app.tokens import TRANSFORMERS
from pdproxy.engine_model.hardware import Hardware
from pdproxy.kit.clock import Clock
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.engines import Facts as EngineFacts
from pdproxy.settings.health import Health, Probes
from pdproxy.settings.keys import Auth
from pdproxy.settings.kv import KvReady, LMCache, ReceiverSettings, Turns
from pdproxy.settings.limits import Limits
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import CpuBuffer, MooncakeFacts, SimFacts
from pdproxy_lab.sim.facts import LMCacheFacts as SimLMCache
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.sim.storage import MemoryStorage
from tests.fakes.client import Answer, exchange, request
from tests.fakes.ports import free_port
from tests.fakes.recorder import Recorder
from tests.fakes.several import built
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import DEADLINES, LONG, World, _serve, until

FAST = Hardware(speed=0)
CHUNK = 32


@dataclass
class Pair:
    """A world whose engines are simulators, by their part in it."""

    world: World
    p: SimServer
    d: SimServer
    plain: SimServer
    more: tuple[SimServer, ...] = ()
    """Further prefill engines, then further decode engines."""
    headers: tuple[tuple[str, str], ...] = ()
    """Those of requests that have none of their own."""

    async def ask(
        self, path: str, body: dict[str, Any], headers: Sequence[tuple[str, str]] = ()
    ) -> Answer:
        """Ask the proxy."""
        return await self.world.ask(path, body, headers or self.headers)

    async def asked_plain(self, path: str, body: dict[str, Any]) -> Answer:
        """Ask the plain engine the same."""
        return await exchange(self.plain.port, request("POST", path, body))

    async def noticed(self) -> None:
        """Wait until the proxy has read all notices that its engines have sent so far."""
        sent = sum(one.engine.notice_sender.counts["sent"] for one in (self.p, self.d, *self.more))
        await until(lambda: self.world.metric("pdproxy_kv_notices_total") >= sent)

    @property
    def loaded(self) -> float:
        """Prompt tokens that D had from elsewhere."""
        return float(self.d.engine.stats.prompt_tokens_by_source["external_kv_transfer"])

    @property
    def computed(self) -> float:
        """Prompt tokens that D computed."""
        return float(self.d.engine.stats.prompt_tokens_by_source["local_compute"])


def _prefill(engine: SimServer, facts: Mapping[str, Any] | None = None) -> ConfiguredEngine:
    bootstrap = engine.engine.bootstrap.url if engine.engine.bootstrap is not None else None
    known = msgspec.structs.replace(_facts(engine, bootstrap), **(facts or {}))
    return ConfiguredEngine(url=engine.url, role="prefill", facts=known)


def _facts(engine: SimServer, bootstrap: str | None = None) -> EngineFacts:
    return EngineFacts(bootstrap=bootstrap, data_parallel_size=engine.facts.data_parallel_size)


@asynccontextmanager
async def pool(
    connector: str,
    *,
    prefills: int = 1,
    decodes: int = 1,
    ranks: int = 1,
    deadlines: Mapping[str, float] | None = None,
    lmcache: Mapping[str, Any] | None = None,
    kv_ready: Mapping[str, Any] | None = None,
    p: Mapping[str, Any] | None = None,
    d: Mapping[str, Any] | None = None,
    everybody: Mapping[str, Any] | None = None,
    sim_lmcache: Mapping[str, Any] | None = None,
    notices: bool = True,
    pool_settings: Mapping[str, Any] | None = None,
    tokenizer: SimTokenizer | None = None,
    turns: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    dispatch: Literal["sequential", "concurrent"] | None = None,
    limits: Mapping[str, Any] | None = None,
    prefill_facts: Mapping[str, Any] | None = None,
    decode_facts: Mapping[str, Any] | None = None,
    kv_ready_at_first: bool = True,
    anything: bool = False,
    health: Mapping[str, float] | None = None,
    auth: Auth | None = None,
    adjust: Callable[[Settings], Settings] = lambda settings: settings,
) -> AsyncIterator[Pair]:
    """Run engines of a connector, usually one pair. `p`, `d`: facts of their role alone,
    `everybody`: of all engines.

    `pool_settings`: settings of the pool beside those that the connector needs. `notices` False: P
    is told a socket that nobody reads. `kv_ready_at_first`: begin when all engines can take part in
    KV transfer.
    `anything`: all engines have role any. `tokenizer`: makes ids of all prompts. `clock`: the
    proxy's; a test that reaches deadlines passes a `ManualClock`. `health`: engines are not watched
    for standing still unless it says so: canaries would be further requests. `adjust` has the last
    word on settings.
    """
    zmq_port, http_port = free_port(), free_port()
    told = {"lmcache-pd": f"tcp://127.0.0.1:{zmq_port if notices else free_port()}"}
    told["nixl"] = told["lmcache-pd"]
    told["lmcache-mp"] = f"http://127.0.0.1:{zmq_port if notices else free_port()}/api/v1/telemetry"
    usual: dict[str, Any] = {
        "model": "tiny",
        "eos_every": 0,
        "hardware": FAST,
        "connector": connector,
    }
    usual |= {"tensor_parallel_size": ranks, **(everybody or {})}
    cpu = {"cpu": CpuBuffer(cpu_port=free_port())} if connector == "cpu" else {}
    usual |= cpu
    if connector in {"lmcache-pd", "lmcache-mp", "cpu"}:
        usual["enable_prefix_caching"] = False
    if connector == "mooncake":
        usual = {"mooncake": MooncakeFacts(bootstrap_port=0), **usual}
    config = {"chunk_size": CHUNK, **(sim_lmcache or {})}
    storage = MemoryStorage() if connector in {"shared", "lmcache-mp", "kvstore-keys"} else None
    notify = {"notify": told[connector]} if connector in told else {}
    d_config = config | {"pd_peer_init_port": 0, "pd_peer_alloc_port": 0, "skip_last_n_tokens": 1}
    async with AsyncExitStack() as stack:
        p_facts = SimFacts(
            **{**usual, "role": "prefill", **notify, "lmcache": SimLMCache(**config), **(p or {})}
        )
        to_d = notify if connector == "nixl" else {}
        d_facts = SimFacts(
            **{**usual, "role": "decode", **to_d, "lmcache": SimLMCache(**d_config), **(d or {})}
        )
        plain_facts = SimFacts(**{**usual, "connector": "none"})
        if anything:
            p_facts = d_facts = msgspec.structs.replace(p_facts, role="any")
        every = [*[p_facts] * prefills, *[d_facts] * decodes, plain_facts]
        started = [
            await stack.enter_async_context(
                SimServer(facts, port=free_port(), chance=number, storage=storage)
            )
            for number, facts in enumerate(every, start=1)
        ]
        *engines, plain = started
        sims = [engines[0], engines[prefills], plain]
        receiver = ReceiverSettings()
        if connector == "lmcache-pd":
            init, alloc = sims[1].engine.receiver_ports
            receiver = ReceiverSettings(init_ports=tuple(init), alloc_ports=tuple(alloc))
        decode = msgspec.structs.replace(_facts(sims[1]), **(decode_facts or {}))
        settings = Settings(
            auth=auth or Auth(),
            pools=(
                Pool(
                    connector=connector,
                    dispatch=dispatch,
                    nodes=tuple(
                        msgspec.structs.replace(_prefill(engine), role="any") for engine in engines
                    )
                    if anything
                    else (
                        _prefill(sims[0], prefill_facts),
                        ConfiguredEngine(
                            url=sims[1].url, role="decode", receiver=receiver, facts=decode
                        ),
                        *[_prefill(engine) for engine in engines[1:prefills]],
                        *[
                            ConfiguredEngine(url=engine.url, role="decode")
                            for engine in engines[prefills + 1 :]
                        ],
                    ),
                    lmcache=LMCache(**{"chunk_size": CHUNK, **(lmcache or {})}),
                    tokenize="always" if tokenizer is not None else "auto",
                    tokenizer="model" if tokenizer is not None else None,
                    **(pool_settings or {}),
                    turns=Turns(**(turns or {})),
                ),
            ),
            deadlines=msgspec.structs.replace(
                DEADLINES, **{"kv_ready": LONG, "tokenize": LONG, **(deadlines or {})}
            ),
            kv_ready=KvReady(
                **{"port": zmq_port, "notifier": connector == "nixl", **(kv_ready or {})}
            ),
            limits=Limits(**(limits or {})),
            health=Health(**{"stalled_after": 0, **(health or {})}),
            probes=Probes(interval=3600, scrape_interval=3600),
        )
        recorder = Recorder()
        library = TRANSFORMERS if tokenizer is None else Shelf(model=tokenizer)
        made = built(adjust(settings), library, clock)
        proxy, *others = made.proxies
        world = World(proxy, None, (), recorder)  # type: ignore[arg-type]
        world.others = others
        world.record()
        made.start()
        together = bool(others)
        world.servers = [
            await _serve(worker, world, http_port, together=together) for worker in world.workers
        ]
        try:
            nodes = [node for worker in world.workers for node in worker.ledger.engines]
            await until(lambda: all(node.probed for node in nodes))
            if kv_ready_at_first:
                await until(lambda: all(node.kv_not_ready is None for node in nodes))
            more = (*engines[1:prefills], *engines[prefills + 1 :])
            headers = tuple(
                ("authorization", f"Bearer {key}") for key in settings.auth.api_keys[:1]
            )
            yield Pair(world, sims[0], sims[1], sims[2], tuple(more), headers)
            await until(lambda: not world.busy())
        finally:
            await world.disconnect()
            await made.stop()
