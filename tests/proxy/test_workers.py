"""A proxy with two workers, as processes: they serve, are drained, killed, stopped, and leave
nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pdproxy.app.listening import listen_together
from tests.fakes import answers, scripts
from tests.fakes.client import Client
from tests.fakes.forked import piped
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served, served
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, completion, until


async def _serves(proxy: Served, count: int = 8) -> None:
    for _ in range(count):
        answer = await proxy.ask("POST", COMPLETIONS, completion())
        assert answer.status == 200, answer.body


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_two_workers_serve_and_drain(tmp_path: Path) -> None:
    """A stream that is under way is completed; then all processes are gone, with exit code 0."""
    go = asyncio.Event()

    path = tmp_path / "log"
    with path.open("wb") as log:
        async with served(log, workers=2) as proxy:
            pids = proxy.workers()
            assert len(pids) == 2
            await _serves(proxy, 12)
            proxy.decode.script(scripts.after_word(go, scripts.one_more_word))
            client = await Client.connect(proxy.port)
            client.post(COMPLETIONS, completion(stream=True))
            head = await client.head()
            proxy.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            go.set()
            assert (await client.rest(head)).body == WORD + WORD + answers.end()
            assert await proxy.process.wait() == 0
            assert not any(_runs(pid) for pid in pids)
    lines = path.read_text()
    assert "worker=0" in lines
    assert "worker=1" in lines


async def test_a_killed_worker_is_replaced_and_the_other_streams_on(tmp_path: Path) -> None:
    """One of two streams ends with its worker; the other one does not notice. New requests are
    served by all.
    """
    go = asyncio.Event()

    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2) as proxy:
            pids = proxy.workers()
            clients = []
            # the system spreads connections by chance: all with one worker is 1 in 32,768
            for _ in range(16):
                proxy.decode.script(scripts.after_word(go, scripts.one_more_word))
                client = await Client.connect(proxy.port)
                client.post(COMPLETIONS, completion(stream=True))
                clients.append((client, await client.head()))
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: not _runs(pids[0]))
            go.set()
            ends = await asyncio.gather(
                *(client.rest(head) for client, head in clients), return_exceptions=True
            )
            whole = [
                one
                for one in ends
                if not isinstance(one, BaseException) and one.body == WORD + WORD + answers.end()
            ]
            assert 0 < len(whole) < 16
            await _serves(proxy, 12)
            await until(lambda: len(proxy.workers()) == 2)
            assert pids[1] in proxy.workers()
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.process.wait() == 0


async def test_no_process_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2) as proxy:
            pids = proxy.workers()
            proxy.process.kill()
            await proxy.process.wait()
            await until(lambda: not any(_runs(pid) for pid in pids))
            assert len(pids) == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config", "pdproxy.yaml"], "limits.max_queue"),
        (["--api-keys-file", "/nowhere/keys"], "auth.api_keys_file"),
        (
            ["--admin", "unix:/nowhere/admin.sock"],
            "listen.admin: can't listen on unix:/nowhere/admin.sock",
        ),
    ],
)
async def test_wrong_settings_end_with_two(arguments: list[str], line: str, tmp_path: Path) -> None:
    """Also what only a worker finds out, and once only."""
    (tmp_path / "pdproxy.yaml").write_text("limits: {max_queue: -1}\n")
    process = await piped(
        "serve", "--workers", "2", "--port", str(free_port()), "--prefill", "127.0.0.1:1",
        "--decode", "127.0.0.1:2",
        *arguments, env={name: value for name,
        value in os.environ.items() if not name.startswith("PDPROXY_")}, cwd=tmp_path,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 2
    shown = [text for text in errors.decode().splitlines() if text.startswith("pdproxy serve: ")]
    assert len(shown) == 1
    assert line in shown[0]


def test_a_port_that_is_taken_is_refused() -> None:
    """Although sockets of one user may share a port: two proxies by mistake would each get a part
    of the requests.
    """
    first = listen_together("127.0.0.1", 0, 2)
    port = first[0].getsockname()[1]
    assert {one.getsockname()[1] for one in first} == {port}
    with pytest.raises(OSError, match="in use"):
        listen_together("127.0.0.1", port, 2)
    for one in first:
        one.close()


async def test_metrics_and_readiness_are_those_of_all(tmp_path: Path) -> None:
    """Counts are exact, whoever is asked, also after a worker was killed that had reported them."""

    async def counted(count: int) -> bool:
        pages = [await proxy.metric("pdproxy_requests_total", outcome="ok") for _ in range(4)]
        return pages == [count] * 4

    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2) as proxy:
            await _serves(proxy, 20)
            assert await counted(20)
            assert await proxy.metric("pdproxy_workers") == 2
            assert await proxy.metric("pdproxy_phase_seconds_count", phase="total") == 20
            assert await proxy.metric("pdproxy_node_up", node=proxy.prefill.url) == 1
            ready = (await proxy.ask("GET", "/ready")).json
            assert ready == {"ready": True, "state": "ok", "reason": None, "details": []}
            await asyncio.sleep(1.5)  # each has reported
            os.kill(proxy.workers()[0], signal.SIGKILL)
            await until_metric(proxy, "pdproxy_worker_restarts_total", 1)
            await until_metric(proxy, "pdproxy_workers", 2)
            assert await counted(20)
            await _serves(proxy, 5)
            assert await counted(25)
            proxy.prefill.stop()
            ready = await _state(proxy, "degraded")
            assert ready["ready"] is True
            assert any(proxy.prefill.url in detail for detail in ready["details"])


async def until_metric(proxy: Served, name: str, value: float) -> None:
    async with asyncio.timeout(PATIENCE):
        while await proxy.metric(name) != value:
            await asyncio.sleep(0.05)


async def _state(proxy: Served, state: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        while True:
            found: dict[str, Any] = (await proxy.ask("GET", "/ready")).json
            if found["state"] == state:
                return found
            await asyncio.sleep(0.05)


async def test_without_a_standard_error() -> None:
    """No socket takes its number, which libuv would not close: workers serve, are replaced, and end
    with 0.
    """
    async with served(None, workers=2) as proxy:
        for pid in (proxy.process.pid, *proxy.workers()):
            assert os.readlink(f"/proc/{pid}/fd/2") == os.devnull
        killed = proxy.workers()[0]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: killed not in proxy.workers() and len(proxy.workers()) == 2)
        await _serves(proxy)
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0


async def test_counters_never_decrease_while_workers_are_killed_and_stopped(tmp_path: Path) -> None:
    """Sixteen clients ask for them meanwhile. Prometheus takes a counter that decreases for one
    that began anew.

    The second time what is left of one worker is added to what is left of another one.
    """
    ended = asyncio.Event()
    pages: list[float] = []

    async def ask() -> None:
        while not ended.is_set():
            with contextlib.suppress(
                OSError, EOFError, TimeoutError
            ):  # it was the one that was killed
                async with asyncio.timeout(5):
                    await proxy.ask("GET", "/metrics")

    async def watch() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(5):
                    await proxy.ask("POST", COMPLETIONS, completion())
                    pages.append(await proxy.metric("pdproxy_requests_total"))

    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2) as proxy:
            await _serves(proxy, 8)
            tasks = [asyncio.create_task(one()) for one in (watch, *[ask] * 16)]
            for times in (1, 2):
                seen = len(pages)
                await until(lambda seen=seen: len(pages) >= seen + 3, PATIENCE)  # type: ignore[misc]
                stopped, killed = proxy.workers()
                os.kill(stopped, signal.SIGSTOP)
                await asyncio.sleep(1.2)  # it answers a second too late
                os.kill(stopped, signal.SIGCONT)
                os.kill(killed, signal.SIGKILL)
                await until_metric(proxy, "pdproxy_worker_restarts_total", times)
            ended.set()
            await asyncio.gather(*tasks)
    assert pages == sorted(pages)
    assert len(pages) > 6
