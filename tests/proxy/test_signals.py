"""SIGHUP beside open streams, and at the start: it ends nothing, and is said in the log, however
many come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

import pytest

from pdproxy.app.signals import HANGUP_LINES_EVERY, Ending, Hangups
from tests.fakes import answers, scripts
from tests.fakes.client import Client, exchange, request
from tests.fakes.engine import Reply
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, served
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import ENVIRONMENT
from tests.fakes.world import COMPLETIONS, completion


async def test_a_hangup_ends_no_stream(tmp_path: Path) -> None:
    """The stream goes on to its end, new requests are served, one line is logged; SIGTERM ends the
    process as ever.
    """
    go = asyncio.Event()

    async def rest(reply: Reply) -> None:
        await reply.pieces(WORD, answers.end())
        await reply.finish()

    path = tmp_path / "log"
    with path.open("wb") as log:
        async with served(log) as proxy:
            proxy.decode.script(scripts.after_word(go, rest))
            client = await Client.connect(proxy.port)
            client.post(COMPLETIONS, completion(stream=True))
            head = await client.head()
            for _ in range(3):
                proxy.process.send_signal(signal.SIGHUP)
                await asyncio.sleep(0.1)
            assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
            go.set()
            assert (await client.rest(head)).body == WORD + WORD + answers.end()
            assert proxy.process.returncode is None
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.process.wait() == 0
    lines = [line for line in path.read_text().splitlines() if "SIGHUP was ignored" in line]
    assert len(lines) == 1


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_hangup_while_it_begins(workers: int) -> None:
    """A service manager sends it as soon as the process is there: the libraries of the server are
    not loaded yet.
    """
    port = free_port()
    words = [
        "--port",
        str(port),
        "--workers",
        str(workers),
        "--aggregated",
        f"127.0.0.1:{free_port()}",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdproxy",
        "serve",
        *words,
        env=ENVIRONMENT,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        status = Path(f"/proc/{process.pid}/status")
        async with asyncio.timeout(PATIENCE):
            while not int(status.read_text().split("SigIgn:")[1].split()[0], 16) & 1:
                await asyncio.sleep(0.005)
            while process.returncode is None:
                process.send_signal(signal.SIGHUP)
                with contextlib.suppress(OSError):
                    assert (await exchange(port, request("GET", "/health", b""))).status in (
                        200,
                        503,
                    )
                    break
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def test_many_hangups_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A line at the first, and then at most one in a while, with how many came."""
    now = 0.0
    hangups = Hangups(lambda: now)
    for number in range(100):
        now = number * HANGUP_LINES_EVERY / 25
        hangups.signalled()
    counts = [record.args for record in caplog.records if record.levelno == logging.WARNING]
    assert counts == [(1,), (26,), (51,), (76,)]


@pytest.mark.parametrize("workers", [1, 2])
async def test_new_requests_are_served_while_balancers_notice(workers: int) -> None:
    """After SIGTERM: not ready, and requests are served, on connections that end. A second SIGTERM
    begins the drain.
    """
    async with served(asyncio.subprocess.DEVNULL, workers=workers, linger=600) as proxy:
        go = asyncio.Event()
        proxy.decode.script(scripts.after_word(go, scripts.one_more_word))
        stream, kept = await Client.connect(proxy.port), await Client.connect(proxy.port)
        stream.post(COMPLETIONS, completion(stream=True))
        head = await stream.head()
        kept.post(COMPLETIONS, completion())
        assert (await kept.answer()).header("connection") is None
        proxy.process.send_signal(signal.SIGTERM)
        for _ in range(4 * workers):
            async with asyncio.timeout(PATIENCE):
                while (ready := await proxy.ask("GET", "/ready")).status == 200:
                    await asyncio.sleep(0.02)
            assert ready.json["reason"] == "shutting down"
        kept.post(COMPLETIONS, completion())
        for answer in (
            await kept.answer(),
            await proxy.ask("POST", COMPLETIONS, completion(stream=True)),
            ready,
        ):
            assert (answer.header("connection"), answer.status) == (
                "close",
                503 if answer is ready else 200,
            )
        assert await kept.closed()
        proxy.process.send_signal(signal.SIGTERM)
        # A worker without requests ends at once, and a connection that it has just taken with it.
        with contextlib.suppress(ConnectionResetError) if workers > 1 else contextlib.nullcontext():
            async with asyncio.timeout(PATIENCE):
                while (await proxy.ask("POST", COMPLETIONS, completion())).status == 200:
                    await asyncio.sleep(0.02)
        go.set()
        assert (await stream.rest(head)).body == WORD + WORD + answers.end()
        assert await proxy.process.wait() == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_after_a_while_the_process_ends_by_itself(workers: int) -> None:
    async with served(asyncio.subprocess.DEVNULL, workers=workers, linger=0.3) as proxy:
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0


@pytest.mark.parametrize(
    ("signals", "is_draining", "is_at_once"),
    [
        ([signal.SIGTERM], False, False),
        ([signal.SIGTERM, signal.SIGTERM], True, False),
        ([signal.SIGTERM, signal.SIGINT], True, False),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGINT], True, True),
        ([signal.SIGTERM] * 3, True, False),
        ([signal.SIGINT], True, False),
        ([signal.SIGINT, signal.SIGTERM], True, False),
        ([signal.SIGINT, signal.SIGINT], True, True),
    ],
)
async def test_what_signals_ask_for(
    signals: list[signal.Signals], is_draining: bool, is_at_once: bool
) -> None:
    """Who presses Ctrl-C waits for no balancer."""
    ending = Ending()
    for number in signals:
        ending.signalled(number)
    assert (ending.requested.is_set(), ending.draining.is_set(), ending.at_once.is_set()) == (
        True,
        is_draining,
        is_at_once,
    )
