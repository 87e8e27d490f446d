"""Mooncake on real engines (contract `mooncake`)."""

# Runs only if this file is named, in a network namespace of its own: Mooncake listens on all
# addresses of the machine. So engines, proxy and tests run where there is only the loopback, as in
# `.ci/full`:
#
#     python tests/engines/build.py --overlay mooncake
#     unshare -rn sh -c 'ip link set lo up; exec pytest tests/engines/long_mooncake.py'
#
# Starts a prefill and a decode engine with Mooncake 0.3.13, and the code that vLLM lacks on a CPU
# (`connectors/cpu_mooncake.py`). PDPROXY_TEST_SHAPES=all takes every shape and 100 clients that
# leave in each order.

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.fakes.ports import free_port

from .build import ensure, ensure_overlay, libraries
from .client import Progress, ask
from .compare import differs
from .connected import CONNECTORS, PairOptions, pair
from .counters import Counters
from .engine import MODEL, Engine
from .equality import SOURCE, USED, equal
from .fleet import Fleet
from .launcher import Launcher
from .prompts import ids
from .proxy import Proxy
from .shapes import COMPLETIONS, SHAPES, Body, Shape, story
from .test_faults import broke_honestly
from .test_load import _leave, _until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]

ALL = os.environ.get("PDPROXY_TEST_SHAPES") == "all"
EVERY = 1 if ALL else 8
CLIENTS = 100 if ALL else 40
ORDERS = ("concurrent", "sequential")
KEPT = 10
"""Seconds for which P keeps KV that D does not ask for, and lets D wait for KV that it does not
have. vLLM's default: 480.
"""
LONGER = 60
"""Seconds that D waits longer than that for an answer of P."""
KV = {
    "kv_connector": "CpuMooncakeConnector",
    "kv_connector_module_path": "cpu_mooncake",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}


@dataclass
class Mooncakes:
    """The engines, and what they are started with again."""

    fleet: Fleet
    bootstrap: int = field(default_factory=free_port)

    @property
    def env(self) -> dict[str, str]:
        """Both engines' additional variables."""
        return {
            "PYTHONPATH": str(CONNECTORS),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(KEPT),
        }

    @property
    def prefill(self) -> Engine:
        """The engine that keeps KV."""
        return self.fleet.prefills[0]

    @property
    def decode(self) -> Engine:
        """The engine that asks for it."""
        return self.fleet.decodes[0]

    def again(self, engine: Engine) -> None:
        """Start an engine again on its port. It has a new engine id."""
        self.fleet.start_again(engine)
        new = self.fleet.engines[engine.name]
        new.post(COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1})


@pytest.fixture(scope="module", autouse=True)
def _only_the_loopback() -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert names == {"lo"}, (
        f"Mooncake listens on all addresses, and {sorted(names)} are here: see the module's text"
    )


@pytest.fixture(scope="module")
def launcher(_only_the_loopback: None) -> Iterator[Launcher]:
    """Starts engines that find Mooncake and its libraries."""
    built = ensure()
    overlay = ensure_overlay(built, "mooncake")
    launcher = Launcher(built, [overlay], {"LD_LIBRARY_PATH": libraries(overlay)})
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def plain(launcher: Launcher) -> Iterator[Engine]:
    """The engine that answers are compared with. It runs in the same namespace."""
    engine = Engine.start(launcher, "mooncake-plain", "plain")
    try:
        engine.wait().post(
            COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
        )
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def engines(launcher: Launcher, plain: Engine) -> Iterator[Mooncakes]:
    """A prefill engine with a bootstrap server, and a decode engine."""
    made = Mooncakes(Fleet(launcher))
    options = PairOptions(KV, env={"prefill": made.env, "decode": made.env})
    with pair(launcher, plain, "mooncake", options, {}) as fleet:
        made.fleet = fleet
        yield made


@pytest.fixture(scope="module", params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    """Both legs at once, or one after the other."""
    return str(request.param)


@pytest.fixture(scope="module")
def proxy(
    engines: Mooncakes, order: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """pdproxy in front of them, in one order; it has paired them."""
    for engine in (engines.prefill, engines.decode):
        if not engine.healthy():  # a test before has failed
            engines.again(engine)
    settings = {
        "pools": [
            {"connector": "mooncake", "bootstrap_port": engines.bootstrap, "dispatch": order}
        ],
        "deadlines": {"first_token": 15.0, "prefill": 20.0},
        "probes": {"scrape_interval": 1.0},
    }
    proxy = Proxy.start(
        [engines.prefill], [engines.decode], tmp_path_factory.mktemp("mooncake"), settings=settings
    )
    asyncio.run(_paired(proxy))
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


def _body(words: int = 1, **fields: object) -> Body:
    return {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)) * words,
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }


def _handles(proxy: Proxy, end: str) -> float:
    return proxy.counters().sum("pdproxy_kv_handles_ended_total", end=end)


async def _paired(proxy: Proxy, seconds: float = 60) -> None:
    """Return once a prompt's KV has moved."""
    await _until(lambda: proxy.ready() == 200, seconds, "not ready")
    before, end = _handles(proxy, "loaded"), time.monotonic() + seconds
    while _handles(proxy, "loaded") == before:
        assert time.monotonic() < end, f"the engines are not paired\n{proxy.tail()}"
        assert (await ask(proxy.url, COMPLETIONS, _body())).status == 200
        await asyncio.sleep(0.2)


def _rose(before: Counters, after: Counters, **labels: str) -> float:
    return after.sum(SOURCE, **labels) - before.sum(SOURCE, **labels)


def _free(*engines: Engine) -> Callable[[], bool]:
    return lambda: not any(engine.counters().sum(USED) for engine in engines)


def _nothing_known(proxy: Proxy) -> bool:
    return not any(proxy.counters().by("pdproxy_kv_handles", "state").values())


class TestEachOrder:
    """Both engines at once, and one after the other."""

    @pytest.mark.parametrize("shape", SHAPES[::EVERY], ids=str)
    async def test_answer_is_the_plain_engines(
        self, engines: Mooncakes, proxy: Proxy, order: str, shape: Shape
    ) -> None:
        """Status, body, events, ids and usage equal the plain engine's; the KV moved; the prefill
        engine is free.
        """
        at_once = order == "concurrent"
        await equal(engines.fleet, proxy, shape, at_once=at_once, several=False)

    async def test_the_order(self, engines: Mooncakes, proxy: Proxy, order: str) -> None:
        """The decode engine computes nothing of a prompt; it had the request before the prefill
        engine answered, or not.
        """
        overlaps = proxy.counters().sum("pdproxy_legs_overlap_seconds_count")
        before = engines.decode.counters()
        body = _body() | {"prompt": ids(secrets.token_hex(6), 640)}
        plain, other = (
            await ask(engines.fleet.plain.url, COMPLETIONS, body),
            await ask(proxy.url, COMPLETIONS, body),
        )
        assert not differs(plain, other)
        after = engines.decode.counters()
        assert _rose(before, after, source="external_kv_transfer") == 640
        assert _rose(before, after, source="local_compute") == 0
        overlaps = proxy.counters().sum("pdproxy_legs_overlap_seconds_count") - overlaps
        assert overlaps == (order == "concurrent")

    async def test_nothing_is_held_behind_clients_that_leave(
        self, engines: Mooncakes, proxy: Proxy
    ) -> None:
        """Both engines are free in the end; what could not be released is freed by the engines' own
        times.
        """
        chance, gate = random.Random(7), asyncio.Semaphore(6)

        async def one(number: int) -> str:
            async with gate:
                return await _leave(proxy, random.Random(number))

        went = Counter(
            await asyncio.gather(*(one(chance.randrange(1 << 30)) for _ in range(CLIENTS)))
        )
        left = time.monotonic()
        assert went["closed"] + went["reset"] > CLIENTS / 4, went
        await _until(lambda: _nothing_known(proxy), 60, "handles are held")
        try:
            await _until(
                _free(engines.prefill, engines.decode), KEPT + LONGER + 10, "KV is still held"
            )
        except AssertionError as error:
            raise AssertionError(_usage(engines)) from error
        ended = proxy.counters().by("pdproxy_kv_handles_ended_total", "end")
        print(
            f"\n{dict(went)}; handles ended {dict(ended)}; free {time.monotonic() - left:.1f} s "
            f"after the last client"
        )
        assert proxy.counters().sum("pdproxy_kv_stuck") == 0
        await _paired(proxy)

    async def test_the_decode_engine_is_killed(self, engines: Mooncakes, proxy: Proxy) -> None:
        """After the prefill and before the KV was asked for: an error soon, as no other can answer,
        and no KV is left.
        """
        engines.decode.signal(signal.SIGSTOP)
        before = engines.prefill.counters()
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, _body(6)))
        try:
            await _until(
                lambda: _rose(before, engines.prefill.counters()) > 0,
                20,
                "the prompt was not prefilled",
            )
        finally:
            engines.decode.kill()
        killed = time.monotonic()
        seen = await asked
        assert seen.status in (502, 503), "the connection ended, and a new one was refused"
        assert seen.json["error"]["code"] == seen.status
        assert seen.seconds < 30
        await _until(_free(engines.prefill), KEPT + 10, "the prefill engine still holds the KV")
        print(
            f"\nthe prefill engine was free {time.monotonic() - killed:.0f} s after the decode "
            f"engine was killed"
        )
        await _until(lambda: _nothing_known(proxy), 30, "handles are held")
        await asyncio.to_thread(engines.again, engines.decode)
        await _paired(proxy)

    async def test_the_decode_engine_is_killed_in_mid_stream(
        self, engines: Mooncakes, proxy: Proxy
    ) -> None:
        """At once an error event in OpenAI's form. The KV was sent: the prefill engine is free."""
        body = _body(6) | {"stream": True, "ignore_eos": True, "max_tokens": 400}
        plain = await ask(engines.fleet.plain.url, COMPLETIONS, body)
        progress = Progress(events=5)
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
        await progress.wait()
        engines.decode.kill()
        killed = time.monotonic()
        broke_honestly(plain, await asked)
        assert time.monotonic() - killed < 2
        await _until(_free(engines.prefill), KEPT + 10, "the prefill engine still holds the KV")
        await asyncio.to_thread(engines.again, engines.decode)
        await _paired(proxy)

    async def test_the_prefill_engine_is_killed_before_it_is_asked(
        self, engines: Mooncakes, proxy: Proxy
    ) -> None:
        """The proxy has not noticed: the client gets the right answer, by the decode engine
        alone.
        """
        body = _body(6)
        plain = await ask(engines.fleet.plain.url, COMPLETIONS, body)
        engines.prefill.kill()
        seen = await ask(proxy.url, COMPLETIONS, body)
        assert not differs(plain, seen, strict=False, warm=True)
        assert seen.seconds < 30
        await asyncio.to_thread(engines.again, engines.prefill)
        await _until(lambda: proxy.ready() == 200, 60, "not ready")
        await _paired(proxy)
        await _until(_free(engines.decode), KEPT + LONGER + 30, "the decode engine still waits")

    async def test_the_prefill_engine_is_killed(
        self, engines: Mooncakes, proxy: Proxy, order: str
    ) -> None:
        """While it computes. The client gets the right answer; what the decode engine keeps is
        counted, and freed by itself.
        """
        body = _body(6)
        plain = await ask(engines.fleet.plain.url, COMPLETIONS, body)
        engines.prefill.signal(signal.SIGSTOP)
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body))
        try:
            if order == "concurrent":
                await _until(_taken(engines.decode), 10, "the decode engine was not asked")
            else:
                await asyncio.sleep(0.5)
        finally:
            engines.prefill.kill()
        killed = time.monotonic()
        seen = await asked
        assert not differs(plain, seen, strict=False, warm=True)
        assert seen.seconds < 30
        held = engines.decode.counters().sum(USED)
        stuck = proxy.counters().sum("pdproxy_kv_stuck", node=engines.decode.url)
        print(f"\nthe decode engine holds {held:.1%} of its blocks, {stuck:.0f} requests are stuck")
        assert (stuck > 0) >= (held > 0), "what nobody frees is counted"
        await asyncio.to_thread(engines.again, engines.prefill)
        await _until(lambda: proxy.ready() == 200, 60, "not ready")
        await _paired(proxy)
        await _until(_free(engines.decode), KEPT + LONGER + 30, "the decode engine still waits")
        print(
            f"the decode engine was free {time.monotonic() - killed:.0f} s after the prefill "
            f"engine was killed"
        )


def _usage(engines: Mooncakes) -> str:
    names = (USED, "vllm:num_requests_waiting", "vllm:num_requests_running")
    return str(
        [
            [engine.counters().sum(name) for name in names]
            for engine in (engines.prefill, engines.decode)
        ]
    )


def _taken(engine: Engine) -> Callable[[], bool]:
    """Return whether an engine works at a request, or keeps one waiting."""

    def taken() -> bool:
        counters = engine.counters()
        return (
            counters.sum("vllm:num_requests_waiting") + counters.sum("vllm:num_requests_running")
            > 0
        )

    return taken
