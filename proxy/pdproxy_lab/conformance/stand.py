"""The proxy itself, on a port of the loopback, in front of one pair of engines: built and served as
`pdproxy serve` does it.

`settings_for` lists all that is changed in the operator's settings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from msgspec import structs

from pdproxy.app.compose import Proxy
from pdproxy.app.listening import listen
from pdproxy.app.server import uvicorn_config
from pdproxy.kit.addresses import reachable
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.listen import Listen
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy_lab.conformance.tap import Tap

LOOPBACK = "127.0.0.1"
_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Stand:
    """A proxy that runs. `key`: what its clients must bring."""

    proxy: Proxy
    tap: Tap
    url: str
    key: str

    def busy(self) -> list[str]:
        """Return in words what has not ended yet."""
        proxy = self.proxy
        found = [
            f"{engine.requests} legs to {engine.url}"
            for engine in proxy.ledger.engines
            if engine.requests
        ]
        found += [
            f"{count} handles {state}"
            for state, (count, _) in proxy.custodian.snapshot().items()
            if count
        ]
        found += (
            [f"{proxy.transfer.ready.waiting} waits for notices"]
            if proxy.transfer.ready.waiting
            else []
        )
        return found


def settings_for(
    settings: Settings,
    prefill: ConfiguredEngine,
    decode: ConfiguredEngine,
    key: str,
    *,
    notices: bool,
) -> Settings:
    """Return an operator's settings for a proxy of this kind.

    One pair of engines with all encoder engines, no TLS, a key of its own (so the proxy sends the
    engines' keys), no breaker, no watch over engines that stand still: a failed check must not
    exclude an engine from the next one. It listens on the loopback. With `notices` False it
    receives no notice.
    """
    # Each engine has one role here, and each prompt that can be split is.
    engines = (
        structs.replace(prefill, role="prefill", sources=(), serves_whole=False),
        structs.replace(decode, role="decode", sources=()),
        *(engine for engine in settings.pool.nodes if engine.encodes),
    )
    kv_ready = (
        settings.kv_ready if notices else structs.replace(settings.kv_ready, host=LOOPBACK, port=0)
    )
    return structs.replace(
        settings,
        listen=Listen(host=LOOPBACK),
        auth=structs.replace(settings.auth, api_keys=(key,), api_keys_file=None),
        pools=(
            structs.replace(
                settings.pool,
                nodes=engines,
                policy=PoolPolicy(),
                pair_within=(),
                kv_ready_port=None,
            ),
        ),
        limits=structs.replace(settings.limits, breaker_failures=_NEVER),
        health=structs.replace(settings.health, stalled_after=0.0),
        kv_ready=kv_ready,
    )


def with_wait(settings: Settings, seconds: float) -> Settings:
    """Return the settings with another limit of the wait for notices, in seconds."""
    return structs.replace(
        settings, deadlines=structs.replace(settings.deadlines, kv_ready=seconds)
    )


@asynccontextmanager
async def stand(settings: Settings, key: str) -> AsyncIterator[Stand]:
    """Run a proxy on any free port of the settings' host.

    Raises:
        SettingsError: a port is taken, or a file can't be used.
    """
    tap = Tap()
    proxy = Proxy.build(settings, watch=tap.watch)
    host = settings.listen.host
    with listen(host, 0) as listener:
        config = uvicorn_config(proxy)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        try:
            proxy.start()
            await server.startup(sockets=[listener])
            shown = reachable(host)
            place = f"[{shown}]" if ":" in shown else shown
            yield Stand(proxy, tap, f"http://{place}:{listener.getsockname()[1]}", key)
        finally:
            for task in list(server.server_state.tasks):
                task.cancel()
            if server.started:
                server.force_exit = True
                await server.shutdown(sockets=[listener])
            await proxy.custodian.settle(settings.deadlines.release)
            await proxy.stop()


async def ready(one: Stand, within: float) -> str | None:
    """Wait until a proxy would split a request. Return why it would not, None if it would."""
    ledger = one.proxy.ledger
    end = time.monotonic() + within
    while True:
        wrong = one.proxy.readiness()
        why = wrong.reason or next((words for words in ledger.shortcomings(time.monotonic())), None)
        if why is None or time.monotonic() > end:
            return why
        await asyncio.sleep(0.02)
