"""A log that nobody reads, or that can't be written, and clients that would fill it: requests are
served all the same.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdproxy.app.readiness import MAX_DETAIL
from pdproxy.observe.formats import MAX_LINE, TextFormatter
from pdproxy.wire.model import MAX_MODEL_NAME
from tests.fakes import answers, scripts
from tests.fakes.admin import admin
from tests.fakes.engine import Reply
from tests.fakes.process import PATIENCE, served
from tests.fakes.world import COMPLETIONS, World, completion, until, world

QUEUE = 32_768
"""Bytes of lines that may wait in these tests: a hundred requests fill it."""
REQUESTS = 400
MIB = 1 << 20


class Pipe:
    """A pipe whose reader decides when to read."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(self.read_end, False)
        self._read = b""

    def lines(self) -> list[str]:
        """All whole lines so far."""
        try:
            while part := os.read(self.read_end, 65536):
                self._read += part
        except BlockingIOError:
            pass
        return self._read[: self._read.rfind(b"\n") + 1].decode().splitlines()

    def close(self) -> None:
        """Close what is left of it."""
        for end in (self.read_end, self.write_end):
            if end >= 0:
                os.close(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def requests_in(lines: list[str]) -> int:
    return sum("pdproxy.access request " in line for line in lines)


def reported(lines: list[str]) -> list[int]:
    """What the lines about dropped lines say, in their order."""
    found = [re.search(r"log lines were dropped.* lines=(\d+)$", line) for line in lines]
    return [int(one[1]) for one in found if one is not None]


async def test_a_pipe_that_nobody_reads(pipe: Pipe) -> None:
    """Requests go on being served; each line is read later or counted as dropped; one line says how
    many, in its place.
    """
    async with served(pipe.write_end, max_bytes=QUEUE) as proxy:
        for _ in range(REQUESTS):
            assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
        assert (await proxy.ask("GET", "/ready")).status == 200
        dropped = await proxy.metric("pdproxy_log_lines_dropped_total")
        assert dropped > REQUESTS / 2, "the queue is bounded"
        await until(lambda: reported(pipe.lines()), PATIENCE)
        lines = pipe.lines()
        assert reported(lines) == [dropped]
        assert requests_in(lines) + dropped == REQUESTS
        assert "lines=" in lines[-1], "it comes behind what waited"
        assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
        await until(lambda: requests_in(pipe.lines()) + dropped == REQUESTS + 1, PATIENCE)
        assert await proxy.metric("pdproxy_log_lines_dropped_total") == dropped


async def test_the_process_ends_although_nobody_reads(pipe: Pipe) -> None:
    """The end waits for the log for a moment only."""
    async with served(pipe.write_end, max_bytes=QUEUE) as proxy:
        for _ in range(REQUESTS // 4):
            await proxy.ask("POST", COMPLETIONS, completion())
        proxy.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            assert await proxy.process.wait() == 0


async def test_the_last_lines_are_written(pipe: Pipe) -> None:
    """An orderly end writes what waits, in the order in which it came."""
    async with served(pipe.write_end) as proxy:
        assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.process.wait()
    lines = pipe.lines()
    assert requests_in(lines) == 1
    assert "shutting down" in lines[-1]
    assert [line[:23] for line in lines] == sorted(line[:23] for line in lines)


async def test_a_reader_that_has_left(pipe: Pipe) -> None:
    """A pipe that is closed costs lines and nothing else; they are counted."""
    async with served(pipe.write_end) as proxy:
        os.close(pipe.read_end)
        pipe.read_end = -1
        before = await proxy.metric("pdproxy_log_lines_dropped_total")
        for _ in range(3):
            assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
        async with asyncio.timeout(PATIENCE):
            while await proxy.metric("pdproxy_log_lines_dropped_total") < before + 3:
                await asyncio.sleep(0.05)
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0


async def test_a_standard_error_that_is_closed() -> None:
    """A process that was started without one serves as any other."""
    async with served(None) as proxy:
        assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
        assert await proxy.metric("pdproxy_log_lines_dropped_total") >= 1
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0


@pytest.mark.parametrize("closed", ["2>&-", "2>&1 >/dev/null | :"])
async def test_wrong_settings_without_a_standard_error(closed: str) -> None:
    """The exit code is the same, whoever can read the line about it."""
    command = f"{sys.executable} -m pdproxy serve --port -1 {closed}; exit ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert await process.wait() == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
# 12 are 96 MiB, if they stayed
@pytest.mark.parametrize(("log_format", "count"), [("text", 12), ("json", 2)])
async def test_models_as_long_as_bodies(log_format: str, count: int, tmp_path: Path) -> None:
    """The engine gets them whole and answers its own 404; nothing of them stays, in memory or in
    the log.
    """
    path = tmp_path / "log"
    with path.open("wb") as log:
        async with served(log, log_format=log_format) as proxy:
            await proxy.ask("POST", COMPLETIONS, completion(model="x" * 8 * MIB))
            before = proxy.memory()
            name = "é" * 4 * MIB
            for number in range(count):
                body = json.dumps(completion(model=f"{number} @")).replace("@", name).encode()
                answer = await proxy.ask("POST", COMPLETIONS, body)
                assert answer.status == 404
            assert proxy.memory() - before < 64 * MIB
            assert len(proxy.decode.requests[-1].body) > 8 * MIB
            assert (
                await proxy.metric("pdproxy_requests_total", model="other", outcome="client")
                == count + 1
            )
            page = (await proxy.ask("GET", "/metrics")).body
            assert len(page) < MIB
            proxy.process.send_signal(signal.SIGTERM)
            await proxy.process.wait()
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) < 2000
    # a time may have these digits
    named = [line for line in lines if re.search(r"\bstatus\W+404\b", line)]
    assert len(named) == count + 1
    assert all("bytes)" in line for line in named)
    if log_format == "json":
        assert all(len(json.loads(line)["model"]) < MAX_MODEL_NAME + 40 for line in named)


async def test_a_long_name_is_no_other_model() -> None:
    """Names that begin as a model's, or as each other, are served by nobody: the engine says so,
    and no pair is tried.
    """
    async with world() as w:
        long = "tiny" + "x" * MAX_MODEL_NAME
        for model in (long, long + "y", "tiny" * 100_000, "日本" * 5000, "\\ud83e" * 3000):
            answer = await w.ask(COMPLETIONS, completion(model=model))
            assert answer.status == 404
            assert json.loads(w.decode[0].requests[-1].body)["model"] == model
        assert not w.prefill[0].requests
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert w.metric("pdproxy_requests_total", model="tiny") == 1


async def test_names_that_an_engine_serves_and_lists_nowhere_are_one_label() -> None:
    """An engine that serves any name gives clients no time series of their own."""
    async with world(0, 1) as w:
        for number in range(3):
            w.decode[0].script(_any_model)
            assert (await w.ask(COMPLETIONS, completion(model=f"mine-{number}"))).status == 200
        assert w.metric("pdproxy_requests_total", model="other", outcome="ok") == 3
        assert "mine" not in w.page().decode()


async def _any_model(reply: Reply) -> None:
    await reply.whole(answers.whole(False, [1], "x", 1))


async def test_an_engines_words_are_bounded_where_they_are_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine that answers probes with a long line makes neither /ready nor a log line long, and
    hides no other line.
    """

    def wordy(w: World) -> None:
        w.decode[0].admin["/metrics"] = scripts.whole(
            b"vllm:num_requests_running{" + b"w" * 2000 + b"}} x\n"
        )

    async with world(decode=2, before=wordy) as w:
        w.prefill[0].stop()
        await w.probe()
        details = (await w.get("/ready")).json["details"]
        assert len(details) == 3, "the two engines, and that no prompt is split"
        (detail,) = (one for one in details if w.decode[0].url in one)
        assert "not in Prometheus text format" in detail
        assert "characters)" in detail
        assert all(len(one) < MAX_DETAIL + 40 for one in details)
    formatter = TextFormatter()
    assert max(len(formatter.format(record)) for record in caplog.records) < MAX_LINE


async def test_a_client_that_floods_the_log_forges_nothing(tmp_path: Path) -> None:
    """Line ends, quotes and escapes in what clients choose: each request has one line, and each
    line is bounded.
    """
    path = tmp_path / "log"
    with path.open("wb") as log:
        async with served(log) as proxy:
            for model in (
                "a\nb INFO pdproxy.access request id=x",
                '"',
                "\x1b[2J",
                "\u2028",
                "x" * 4000,
                "\x00" * 300,
            ):
                assert (await proxy.ask("POST", COMPLETIONS, completion(model=model))).status == 404
            proxy.process.send_signal(signal.SIGTERM)
            await proxy.process.wait()
    lines = path.read_text().split("\n")
    assert requests_in(lines) == 6
    assert all(line.isprintable() and len(line) < MAX_LINE for line in lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_says_why_and_quotes_no_client(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the line of the leg that failed and for the admin API: in whole answers and streams."""
    text = "EngineCore encountered an issue with\n'my medical record 4711'"
    error = json.dumps({"error": {"message": text, "type": "InternalServerError", "code": 500}})
    script = (
        scripts.streams(scripts.WORD, b"data: " + error.encode() + b"\n\n")
        if stream
        else scripts.whole(error.encode(), 500)
    )
    async with world(decode=1) as w, admin(w) as api:
        w.decode[0].default = script
        await w.ask(COMPLETIONS, completion(stream=stream), [("x-request-id", "mine")])
        await until(lambda: not api.running)
        (found,) = (await api.get("/requests?id=mine"))["requests"]
    lines = [TextFormatter().format(one) for one in caplog.records if one.msg == "%s"]
    line = next(one for one in lines if "leg failed" in one)
    for shown in (line, found["failures"][0]["error"]):
        assert "500: EngineCore encountered an issue with ..." in shown
        assert "medical" not in shown
        assert "4711" not in shown
