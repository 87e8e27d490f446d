"""`listen.uds`: clients and health checks reach the proxy over a Unix socket, whose file is the
proxy's own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.books import Books
from tests.fakes.client import Answer, Client, request
from tests.fakes.engine import FakeEngine
from tests.fakes.forked import COMMAND, Piped, piped
from tests.fakes.world import COMPLETIONS, TEXT, completion

PATIENCE = 180.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


async def ask(path: str, head: bytes) -> Answer:
    client = Client(*await asyncio.open_unix_connection(path))
    try:
        client.send(head)
        return await client.answer()
    finally:
        client.close()


async def run(*arguments: str) -> Piped:
    return await piped(*arguments, env=ENVIRONMENT, code=f"import os; os.umask(0o007); {COMMAND}")


async def end_of(process: Piped) -> tuple[int | None, str]:
    async with asyncio.timeout(PATIENCE):
        _, told = await process.communicate()
    return process.returncode, told.decode()


async def end(process: Piped) -> tuple[int | None, str]:
    with suppress(ProcessLookupError):
        process.terminate()
    return await end_of(process)


@asynccontextmanager
async def engines() -> AsyncIterator[list[str]]:
    """A pair of engines; the options that name them."""
    books = Books()
    pair = [FakeEngine(role, books) for role in ("prefill", "decode")]
    for one in pair:
        await one.listen()
    try:
        yield ["--prefill", pair[0].url, "--decode", pair[1].url]
    finally:
        for one in pair:
            one.stop()


async def is_ready(process: Piped, path: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(OSError):
                answer = await ask(path, request("GET", "/ready", b""))
                if answer.status == 200 and b'"degraded"' not in answer.body:
                    return
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.05)


def serve(pair: Sequence[str], path: str, workers: int, *others: str) -> list[str]:
    return ["serve", *pair, "--uds", path, "--workers", str(workers), *others]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def left_behind(path: str) -> None:
    """The socket of a process that is dead."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)
        one.listen()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
async def test_clients_are_served_over_a_unix_socket(
    workers: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and streamed; `pdproxy health` finds it; it replaces a dead process's file, and its own
    is gone at the end.
    """
    left_behind(path)
    monkeypatch.setitem(ENVIRONMENT, "PDPROXY_LISTEN__LINGER", "0")
    async with engines() as pair:
        process = await run(*serve(pair, path, workers))
        try:
            await is_ready(process, path)
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o770, (
                "the umask decides who may connect"
            )
            for _ in range(4):
                assert (await ask(path, request("POST", COMPLETIONS, completion()))).text == TEXT
                assert (
                    await ask(path, request("POST", COMPLETIONS, completion(stream=True)))
                ).text == TEXT
            health = await run("health", "--ready", "--uds", path)
            assert await health.wait() == 0
            second = await run(*serve(pair, path, workers))
            code, told = await end_of(second)
            assert code == 2
            assert (
                told
                == f"pdproxy serve: can't listen on listen.uds = {path}: Address already in use\n"
            )
            assert (await ask(path, request("GET", "/health", b""))).status == 200, (
                "the first one is still there"
            )
        finally:
            code, told = await end(process)
    assert code == 0, told
    assert re.search(rf"listens on unix:{re.escape(path)}\s", told)
    assert not os.path.lexists(path)
    health = await run("health", "--uds", path)
    code, told = await end_of(health)
    assert (code, told) == (
        1,
        f"pdproxy health: unix:{path}:/health: no connection: No such file or directory\n",
    )


@pytest.mark.timeout(600)
async def test_a_worker_that_is_killed_is_replaced_at_the_socket(path: str) -> None:
    """Connections that waited for it are taken by others."""
    async with engines() as pair:
        process = await run(*serve(pair, path, 2))
        try:
            await is_ready(process, path)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            before = set(children.read_text().split())
            os.kill(int(min(before)), signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                while len(after := set(children.read_text().split())) < 2 or after == before:
                    assert (
                        await ask(path, request("POST", COMPLETIONS, completion()))
                    ).text == TEXT
            assert (await ask(path, request("POST", COMPLETIONS, completion()))).text == TEXT
        finally:
            await end(process)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trusted", ["", "unix:"])
async def test_who_connects_has_no_address(
    trusted: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are one client; `unix:` among the trusted proxies has the header name them."""
    monkeypatch.setitem(ENVIRONMENT, "PDPROXY_LISTEN__LINGER", "0")
    if trusted:
        monkeypatch.setitem(ENVIRONMENT, "PDPROXY_LISTEN__TRUSTED_PROXIES", trusted)
    async with engines() as pair:
        process = await run(*serve(pair, path, 1, "--log-format", "json"))
        try:
            await is_ready(process, path)
            client = Client(*await asyncio.open_unix_connection(path))
            client.post(COMPLETIONS, completion(), [("x-forwarded-for", "6.6.6.6, 2.2.2.2")])
            assert (await client.answer()).text == TEXT
            client.close()
        finally:
            _, told = await end(process)
    clients = set(re.findall(r'"client": ?"([^"]*)"', told))
    assert clients == {"2.2.2.2" if trusted else ""}, told


async def test_a_file_that_is_no_socket_stays(path: str) -> None:
    """It may be anything: the operator named it by mistake."""
    Path(path).write_text("mine")
    process = await run(*serve(["--prefill", "localhost:1", "--decode", "localhost:2"], path, 1))
    assert (await end_of(process))[0] == 2
    assert Path(path).read_text() == "mine"
