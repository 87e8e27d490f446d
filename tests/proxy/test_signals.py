"""SIGHUP beside open streams: it ends nothing, and is said in the log, however many come."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest

from pdproxy.app.signals import HANGUP_LINES_EVERY, Hangups
from tests.fakes import answers, scripts
from tests.fakes.client import Client
from tests.fakes.engine import Reply
from tests.fakes.process import served
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, completion


async def test_a_hangup_ends_no_stream(tmp_path: Path) -> None:
    """The stream goes on to its end, new requests are served, one line is logged; SIGTERM ends the process as ever."""
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


def test_many_hangups_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A line at the first, and then at most one in a while, with how many came."""
    now = 0.0
    hangups = Hangups(lambda: now)
    for number in range(100):
        now = number * HANGUP_LINES_EVERY / 25
        hangups.signalled()
    counts = [record.args for record in caplog.records if record.levelno == logging.WARNING]
    assert counts == [(1,), (26,), (51,), (76,)]
