"""A process with few open files, and more clients than it could ever serve: engines' connections
are not what gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections import Counter

import msgspec
import pytest

from pdproxy.app import server
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.limits import Limits
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from tests.fakes.books import Books
from tests.fakes.client import Client, exchange, request
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.world import COMPLETIONS, TEXT, completion

FILES = 256
CLIENTS = 500
BOUND = (
    "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}));"
    "runpy.run_module('pdproxy', run_name='__main__')"
).format


async def ask(port: int, start: asyncio.Event) -> int:
    """One client with a connection of its own; 0 if it got no whole answer."""
    await start.wait()
    try:
        answer = await exchange(port, request("POST", COMPLETIONS, completion()))
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return 0
    assert answer.status != 200 or answer.text == TEXT
    return answer.status


async def test_more_clients_than_open_files() -> None:
    """With 256 open files and 500 clients at once, those that have a connection are served, no
    engine is blamed, and it ends.
    """
    books = Books()
    engines = [FakeEngine("prefill", books), FakeEngine("decode", books)]
    for engine in engines:
        await engine.listen()
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BOUND(FILES), "serve", "--port", str(port),
        "--prefill", engines[0].url, "--decode", engines[1].url,
        env={**os.environ, "PDPROXY_LISTEN__LINGER": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    probe = await Client.connect(port)
                    probe.send(request("GET", "/ready", b""))
                    ready = (await probe.answer()).status == 200
                    probe.close()
                    if ready:
                        break
                await asyncio.sleep(0.05)
            start = asyncio.Event()
            asking = [asyncio.ensure_future(ask(port, start)) for _ in range(CLIENTS)]
            start.set()
            statuses = Counter(await asyncio.gather(*asking))
            assert statuses[200] >= 30, statuses
            assert set(statuses) <= {200, 503, 0}, "nobody hears of a fault that is none"
            assert await ask(port, start) == 200, "as before, once they have left"
        process.terminate()
        _, said = await process.communicate()
        assert b"serving" in said, "the operator is told that the limits don't fit"
        assert b"leg failed" not in said, "no engine was blamed"
        assert b"Too many open files" not in said
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for engine in engines:
            engine.stop()


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit of open files, in place of this process's own."""
    now = [0, 0]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, wanted: now.__setitem__(slice(None), list(wanted))
    )
    return now


def settings(connections: int, inflight: int) -> Settings:
    engines = (
        ConfiguredEngine(url="http://a:1", role="prefill"),
        ConfiguredEngine(url="http://b:1", role="decode"),
    )
    limits = msgspec.structs.replace(Limits(), max_connections=connections, max_inflight=inflight)
    return Settings(pools=(Pool(nodes=engines),), limits=limits)


@pytest.mark.parametrize(
    ("hard", "connections", "inflight"),
    [
        (1_000_000, 8192, 1024),
        (10_308, 8192, 1024),
        (10_307, 8191, 1024),
        (4096, 1980, 1024),
        (256, 64, 62),
        (70, 1, 1),
    ],
)
def test_what_open_files_allow(
    allowed: list[int], hard: int, connections: int, inflight: int
) -> None:
    """Clients' connections give way first, then requests in service: each of them needs two
    connections to engines.
    """
    allowed[:] = [min(64, hard), hard]
    asked = settings(8192, 1024)
    assert server.files_needed(asked) == 8192 + 2 * 1024 + 64 + 4
    fitting = server.fit_files(asked).limits
    assert (fitting.max_connections, fitting.max_inflight) == (connections, inflight)
    assert allowed == [min(hard, 10_308), hard], "raised as far as needed, and no further"


def test_a_limit_that_is_high_enough_is_left_alone(allowed: list[int]) -> None:
    """Nothing is lowered or raised."""
    allowed[:] = [20_000, 20_000]
    asked = settings(8192, 1024)
    assert server.fit_files(asked) is asked
    assert allowed == [20_000, 20_000]
