"""`pdproxy up` with real engines: a killed one serves again, and flags change under load."""

import os
import signal
from pathlib import Path

import pytest

from tests.demo.processes import running
from tests.up.processes import load

from .launcher import Launcher
from .ups import MODEL, START, Up

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900, func_only=True)]


async def test_a_killed_engine_serves_again_and_flags_change(launcher: Launcher) -> None:
    one = Up(launcher.built)
    async with one.serving() as up:
        async with load(one.url, 8, MODEL) as clients:
            await clients.until(16)
            os.kill(one.pid("any-0"), signal.SIGKILL)
            up.printed.clear()
            await up.until("any-0: ready after", START)
            await clients.until(16)
            async with running(*one.options, "--apply", "--", *FLAGS, command="up") as change:
                await change.until("changed: any-0, any-1", 2 * START)
                assert await change.ended() == 0
            await clients.until(16)
        for name in ("any-0", "any-1"):
            line = Path(f"/proc/{one.pid(name)}/cmdline").read_text().split("\0")
            assert line[-3:-1] == FLAGS
        up.process.send_signal(signal.SIGTERM)
        assert await up.ended() == 0


FLAGS = ["--max-num-seqs", "12"]
