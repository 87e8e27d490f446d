"""A real process that follows the file of its settings."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.fakes.client import Client, request
from tests.fakes.forked import command
from tests.fakes.ports import free_port


async def test_a_process_follows_its_file(tmp_path: Path) -> None:
    """At SIGHUP it reads the file that the command line names. Its engines are nowhere: they are
    named in the answer.
    """
    path, port = tmp_path / "pdproxy.yaml", free_port()
    old, new = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"

    def write(url: str, more: str = "") -> None:
        path.write_text(
            f"listen: {{port: {port}}}\npools:\n- nodes:\n  - {{url: {url}, role: aggregated}}\n"
            f"{more}"
        )

    async def details(wanted: str) -> str:
        async with asyncio.timeout(200):  # to start takes long where nothing is idle
            while True:
                await asyncio.sleep(0.05)
                try:
                    client = await Client.connect(port)
                except ConnectionRefusedError:
                    continue
                client.send(request("GET", "/ready", b""))
                answer = await client.answer()
                client.close()
                if wanted in answer.body.decode():
                    return answer.body.decode()

    write(old)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")
    }
    environment["PDPROXY_LISTEN__LINGER"] = "0"
    process = command("serve", "--config", str(path), env=environment)
    try:
        assert new not in await details(old)
        write(new, "limits: {max_inflight: 7, continuations: 0}\n")
        process.send_signal(signal.SIGHUP)
        shown = await details("need a restart: limits.continuations")
        assert new in shown
        assert f"{old}: " not in await details("need a restart")
        assert process.returncode is None
    finally:
        process.terminate()
        assert await process.wait() == 0
