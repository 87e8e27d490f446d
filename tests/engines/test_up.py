"""`pdproxy up` with real engines: from nothing to answers, with one engine killed under load."""

import os
import signal

import pytest

from tests.up.processes import load

from .launcher import Launcher
from .ups import MODEL, Up

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400, func_only=True)]


async def test_an_engine_is_killed_under_load_and_no_request_fails(launcher: Launcher) -> None:
    one = Up(launcher.built)
    async with one.serving() as up:
        async with load(one.url, 8, MODEL) as clients:
            await clients.until(16)
            os.kill(one.pid("any-0"), signal.SIGKILL)
            await up.until("any-0 was killed by signal 9, and starts again in 1 s")
            await clients.until(16)
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 0
