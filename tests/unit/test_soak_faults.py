"""The parts of benchmarks/soak_faults.py: engines without a core are started again, others are left
alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import soak_faults


async def test_the_supervisor_starts_engines_again_that_have_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is dead for long enough, once; nor does one that shows nothing end it."""
    looks: Counter[int] = Counter()
    started: list[tuple[int, str]] = []

    def is_dead(port: int) -> bool:
        looks[port] += 1
        if port == 3:
            raise OSError
        return port == 1 and not started

    monkeypatch.setattr(soak_faults, "is_dead", is_dead)
    monkeypatch.setattr(soak_faults, "post", lambda port, path: started.append((port, path)))
    monkeypatch.setattr(soak_faults, "LOOK", 0.01)
    monkeypatch.setattr(soak_faults, "DEAD", 0.0)
    faults: Counter[str] = Counter()
    admin = (("D", 1), ("P", 4), ("P", 3))
    await soak_faults.supervised(admin, time.monotonic() + 0.5, faults)
    assert started == [(1, "restart")]
    assert faults == {"dead_core D": 1}
    assert looks[3] > 1
    started.clear()
    monkeypatch.setattr(soak_faults, "DEAD", 1000.0)
    await soak_faults.supervised(admin, time.monotonic() + 0.2, faults)
    assert started == []


@pytest.mark.parametrize(
    ("state", "dead"),
    [
        ({"dead": True, "life": "up"}, True),
        ({"dead": False, "life": "up"}, False),
        ({"dead": True, "life": "terminated"}, False),
        ({"dead": True, "life": "down"}, False),
    ],
)
async def test_which_engines_have_no_core(state: dict[str, object], dead: bool) -> None:
    """Those that were killed or terminated are another fault's, which ends them itself."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /state ")
        body = json.dumps(state).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    assert await asyncio.to_thread(soak_faults.is_dead, server.sockets[0].getsockname()[1]) is dead
    server.close()
