"""`pdproxy operator` as a process: how it says that it is well, how it ends, and what it says of
wrong options.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from pdproxy.cli.main import main
from pdproxy_operator import definitions
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.ports import free_port
from tests.unit.test_informer import kubeconfig


@asynccontextmanager
async def operator(
    api: KubernetesApi, folder: Path, port: int, *more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdproxy", "operator", "--kubeconfig", kubeconfig(folder, api)),
        *("--listen", f"127.0.0.1:{port}", *more),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def answer(port: int, path: str) -> tuple[int, str]:
    """The answer, waited for until the process listens."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as found:
                    return found.status, await found.text()
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def test_it_says_how_it_is_and_ends_at_once(tmp_path: Path) -> None:
    port = free_port()
    async with kubernetes_api() as api:
        api.fault = "unavailable"
        async with operator(api, tmp_path, port, "--log-format", "json") as process:
            assert await answer(port, "/health") == (200, "ok\n")
            status, why = await answer(port, "/ready")
            assert (status, "not all objects are known yet" in why) == (503, True)
            assert "the API server answers 503" in why or "nothing was heard yet" in why
            api.fault = ""
            async with asyncio.timeout(60):
                while (await answer(port, "/ready"))[0] != 200:
                    await asyncio.sleep(0.05)
            status, page = await answer(port, "/metrics")
            assert 'pdproxy_operator_reconciles_total{result="done"} 0.0' in page
            assert "pdproxy_operator_leader 1.0" in page
            assert (await answer(port, "/other"))[0] == 404
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
            assert process.stderr is not None
            said = (await process.stderr.read()).decode()
            assert "Traceback" not in said
            assert all(line.startswith("{") for line in said.splitlines())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--namespace", "A_b"], '--namespace: "A_b" is no name of a namespace'),
        (["--listen", "8080"], '--listen: "8080": expected HOST:PORT'),
        (["--listen", "unix:/tmp/x"], '--listen: "unix:/tmp/x": expected HOST:PORT'),
        (["--secret-file", "FOLDER/none"], "--secret-file: FOLDER/none: can't be read"),
        (["--secret-file", "FOLDER/short"], "holds less than 32 characters"),
        (["--kubeconfig", "FOLDER/none"], "kubeconfig FOLDER/none"),
        (["--log-level", "loud"], "--log-level: expected debug or info or warning or error"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("secret")
    folder = str(tmp_path)
    port = ["--listen", f"127.0.0.1:{free_port()}"] if "--listen" not in options else []
    given = [word.replace("FOLDER", folder) for word in options]
    assert main(["operator", *port, *given]) == 2
    err = capsys.readouterr().err
    assert said.replace("FOLDER", folder) in err
    assert err.splitlines()[0].startswith("pdproxy operator: ")
    assert "secret" not in err.replace("secret-file", "")


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["operator", "--listen", place]) == 2
    line = f"pdproxy operator: --listen: can't listen on {place}: Address already in use\n"
    assert capsys.readouterr().err == line


def test_it_prints_its_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "crds"]) == 0
    assert capsys.readouterr().out == definitions.text()
