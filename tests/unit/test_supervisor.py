"""The supervisor of workers: starts, restarts, silence, signals, and the end of all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdproxy.workers import links
from pdproxy.workers.links import Link, Message, pair
from pdproxy.workers.supervisor import Supervisor, SupervisorTimes, WorkerProcess, queued_seconds
from tests.fakes.toy_workers import REFUSALS

PATIENCE = 180.0


class Toy:
    """The process of `tests.fakes.toy_workers`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        """Read its lines until a condition holds."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while not condition(self.lines):
                line = await self.process.stdout.readline()
                assert line, self.lines
                self.lines.append(line.decode().strip())

    async def both(self) -> list[int]:
        """Wait for both workers; return their process ids by their numbers."""
        await self.until(lambda lines: len(self._ready(lines)) == 2)
        ready = self._ready(self.lines)
        return [ready[0], ready[1]]

    @staticmethod
    def _ready(lines: list[str]) -> dict[int, int]:
        return {
            int(line.split()[1]): int(line.split()[2]) for line in lines if line.startswith("ready")
        }

    async def ended(self) -> int:
        """Read the rest, and return the exit code."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            self.lines += (await self.process.stdout.read()).decode().splitlines()
            return await self.process.wait()

    async def drained(self) -> int:
        """Have all of them end in order, and return the exit code."""
        self.process.terminate()
        return await self.ended()


@asynccontextmanager
async def toy(mode: str, folder: Path) -> AsyncIterator[Toy]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.toy_workers", mode, str(folder),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in ("", *sys.path))},
    )  # fmt: skip
    try:
        yield Toy(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_all(tmp_path: Path, number: int) -> None:
    """The exit code is 0, and nobody is left."""
    async with toy("serves", tmp_path) as process:
        pids = await process.both()
        process.process.send_signal(number)
        assert await process.ended() == 0
        assert process.lines[-1] == "restarts 0"
        _gone(pids)


async def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    """Also when it dies again and again; the other one goes on."""
    async with toy("serves", tmp_path) as process:
        _, other = await process.both()
        for times in range(1, 5):
            os.kill((await process.both())[0], signal.SIGKILL)
            await process.until(
                lambda lines, times=times: (
                    sum(line.startswith("ready 0") for line in lines) == times + 1
                )  # type: ignore[misc]
            )
        assert (await process.both())[1] == other
        assert _runs(other)
        assert await process.drained() == 0
        assert process.lines[-1] == "restarts 4"
        assert process.lines.count("died 0") == 5


async def test_a_worker_that_is_silent_is_killed(tmp_path: Path) -> None:
    """Its successor answers, and stays."""
    async with toy("silent", tmp_path) as process:
        await process.until(lambda lines: sum(line.startswith("ready 0") for line in lines) == 2)
        assert "died 0" in process.lines
        assert "died 1" not in process.lines
        assert await process.drained() == 0


async def test_a_worker_that_is_stopped_is_killed(tmp_path: Path) -> None:
    """It answers no pings, but is there."""
    async with toy("serves", tmp_path) as process:
        stopped, _ = await process.both()
        os.kill(stopped, signal.SIGSTOP)
        await process.until(lambda lines: sum(line.startswith("ready 0") for line in lines) == 2)
        _gone([stopped])
        assert await process.drained() == 0


async def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    """However the parent ends."""
    async with toy("serves", tmp_path) as process:
        pids = await process.both()
        process.process.kill()
        await process.process.wait()
        _gone(pids)


async def test_a_parent_that_was_stopped_kills_nobody(tmp_path: Path) -> None:
    """No worker could have answered meanwhile."""
    async with toy("serves", tmp_path) as process:
        await process.both()
        process.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        process.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.2)
        process.process.send_signal(signal.SIGHUP)
        await process.until(lambda lines: {"said 0 reloaded", "said 1 reloaded"} <= set(lines))
        assert await process.drained() == 0
        assert process.lines[-1] == "restarts 0"


async def test_a_hangup_reaches_all(tmp_path: Path) -> None:
    """And ends nobody."""
    async with toy("serves", tmp_path) as process:
        pids = await process.both()
        process.process.send_signal(signal.SIGHUP)
        await process.until(lambda lines: {"said 0 reloaded", "said 1 reloaded"} <= set(lines))
        assert all(_runs(pid) for pid in pids)
        assert await process.drained() == 0


async def test_workers_that_do_not_drain_are_killed(tmp_path: Path) -> None:
    """The exit code says so."""
    async with toy("stays", tmp_path) as process:
        pids = await process.both()
        assert await process.drained() == 1
        _gone(pids)


async def test_a_worker_may_say_that_it_drains_for_longer(tmp_path: Path) -> None:
    """Twice as long as was known at the start: its settings have changed since."""
    async with toy("drains_long", tmp_path) as process:
        await process.both()
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0


async def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    async with toy("stays", tmp_path) as process:
        pids = await process.both()
        process.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        process.process.send_signal(signal.SIGINT)
        assert await process.ended() == 130
        _gone(pids)


async def test_one_process_for_all_begins_first_and_ends_last(tmp_path: Path) -> None:
    """It is started again as a worker is, but after a short pause at most, and counted apart."""
    async with toy("for_all", tmp_path) as process:
        # one that ends before any worker has served ends all
        await process.until(lambda lines: len(process._ready(lines)) == 3)
        for times in range(1, 5):
            await process.until(
                lambda lines, times=times: (  # type: ignore[misc]
                    sum(line.startswith("ready 2") for line in lines) == times
                )
            )
            os.kill(process._ready(process.lines)[2], signal.SIGKILL)
        await process.until(lambda lines: sum(line.startswith("ready 2") for line in lines) == 5)
        await process.until(lambda lines: len(process._ready(lines)) == 3)
        assert await process.drained() == 0
        assert process.lines[0] == "starts 2"
        waited = [line for line in process.lines if line.startswith("waits 2")]
        assert waited == ["waits 2 0", "waits 2 0.05", "waits 2 0.07", "waits 2 0.07"]
        assert process.lines[-3:] == ["died 2", "restarts for all 4", "restarts 0"]


async def test_the_process_for_all_may_be_silent_for_a_shorter_time(tmp_path: Path) -> None:
    """Not if the parent itself was stopped, and no worker is killed for it."""
    async with toy("for_all", tmp_path) as process:
        await process.until(lambda lines: len(process._ready(lines)) == 3)
        stopped = process._ready(process.lines)[2]
        process.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.6)
        process.process.send_signal(signal.SIGCONT)
        process.process.send_signal(signal.SIGHUP)
        await process.until(lambda lines: "said 2 reloaded" in lines)
        assert not {"died 2", "said 0 reloaded", "said 1 reloaded"} & {*process.lines}
        for pid in process._ready(process.lines).values():
            os.kill(pid, signal.SIGSTOP)
        await process.until(lambda lines: sum(line.startswith("ready 2") for line in lines) == 2)
        _gone([stopped])
        for number in range(2):
            os.kill(process._ready(process.lines)[number], signal.SIGCONT)
        assert await process.drained() == 0
        assert process.lines[-2:] == ["restarts for all 1", "restarts 0"]


async def test_workers_that_refuse_end_the_process_for_all(tmp_path: Path) -> None:
    """It serves already, but no worker does: the settings can't be used."""
    async with toy("workers_refuse", tmp_path) as process:
        assert await process.ended() == 3
        assert "refused deadlines.total: too short" in process.lines


async def test_settings_that_cant_be_used_end_all(tmp_path: Path) -> None:
    """With the reason, and without a restart."""
    async with toy("refuses", tmp_path) as process:
        assert await process.ended() == 3
        assert "refused deadlines.total: too short" in process.lines
        assert process.lines[-1] == "restarts 0"


@pytest.mark.parametrize("mode", ["ends", "fails"])
async def test_workers_that_never_serve_end_all(tmp_path: Path, mode: str) -> None:
    """A defect at the start would fail again and again."""
    async with toy(mode, tmp_path) as process:
        assert await process.ended() == 1
        assert process.lines[-1] == "restarts 0"


async def test_what_is_refused_later_ends_nobody_else(tmp_path: Path) -> None:
    """A file that can't be read any more: the other worker serves on, and the one is tried
    again.
    """
    async with toy("refuses_later", tmp_path) as process:
        first, other = await process.both()
        os.kill(first, signal.SIGKILL)
        await process.until(lambda lines: lines.count("died 0") >= 3)
        assert _runs(other)
        assert await process.drained() == 0


async def test_a_system_without_processes_ends_nobody_else(tmp_path: Path) -> None:
    """The worker is started once there is one; until then nothing is left open by the attempts."""
    async with toy("full", tmp_path) as process:
        first, other = await process.both()
        os.kill(first, signal.SIGKILL)
        await process.until(lambda lines: sum(line.startswith("ready 0") for line in lines) == 2)
        assert _runs(other)
        assert await process.drained() == 0
        assert process.lines[-1] == "restarts 1"
        refusals = [line for line in process.lines if line.startswith("refused with")]
        assert len(refusals) == REFUSALS
        assert len(set(refusals)) == 1


async def test_children_of_a_dead_worker_leave_nothing(tmp_path: Path) -> None:
    """Where the supervisor becomes their parent, as process 1 of a container, it takes their end,
    too.
    """
    async with toy("leaves", tmp_path) as process:
        for pid in await process.both():
            os.kill(pid, signal.SIGKILL)
        await process.until(lambda lines: sum(line.startswith("ready") for line in lines) == 4)
        children = [int(line.split()[1]) for line in process.lines if line.startswith("child")]
        deadline = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in children[:2]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert await process.drained() == 0


async def test_sigterm_for_the_whole_group_is_no_failure(tmp_path: Path) -> None:
    """As systemd and shells send it: a worker without a handler ends by it."""
    async with toy("serves", tmp_path) as process:
        pids = await process.both()
        process.process.terminate()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert await process.ended() == 0
        assert process.lines[-1] == "restarts 0"


@pytest.mark.parametrize("noticed", [False, True])
def test_what_a_worker_has_sent_before_its_end_is_read(
    noticed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the parent sends it something meanwhile. Its id may be that of another process by
    then: nothing is killed.
    """
    heard: list[bytes] = []
    killed: list[int] = []

    def received(worker: WorkerProcess, message: Message) -> None:
        heard.append(message.body)
        supervisor.send(worker, message)

    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    watcher = SimpleNamespace(received=received, died=lambda _: None, waits=lambda *_: None)
    supervisor = Supervisor(1, lambda *_: 0, lambda _: watcher, 1.0)
    (worker,) = supervisor.workers
    parents, end = pair()
    worker.link, worker.pid, supervisor._any_ready = Link(parents), 7, True
    theirs = Link(end)
    for body in (b"one", b"two"):
        theirs.send(Message("report", body=body))
    theirs.close()
    supervisor.send(worker, Message("question"))
    if noticed:
        supervisor._died(worker, 0)
    else:
        supervisor._read(worker)
        supervisor._read(worker)
    assert heard == [b"one", b"two"]
    assert not killed
    assert worker.link is None
    assert "is killed" not in caplog.text


def test_a_worker_that_does_not_read_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(links, "MAX_UNSENT", 1 << 20)
    supervisor = Supervisor(1, lambda *_: 0, lambda _: SimpleNamespace(), 1.0)
    (worker,) = supervisor.workers
    parents, end = pair()
    worker.link, worker.pid = Link(parents), 7
    while not killed:
        supervisor.send(worker, Message("page", body=bytes(100_000)))
    assert killed == [7]
    worker.link.close()
    end.close()


def test_time_without_a_processor_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that could run, but had no processor, is not killed for that, up to the time for
    which the slowest process may be silent; one that has had its time is.
    """
    now, queued, killed = 1000.0, 0.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr("pdproxy.workers.supervisor.queued_seconds", lambda _: queued)
    monkeypatch.setattr(os, "kill", lambda *_: killed.append(now))
    made = Supervisor(
        1,
        lambda *_: 0,
        lambda _: SimpleNamespace(starts=lambda _: None),
        1.0,
        SupervisorTimes(ping=1e9),
        for_all="for all",
    )
    last = made.workers[1]
    made.workers[0].heard, made.workers[0].due = now, 1e9
    last.pid, last.ready, last.heard = 1, True, now

    def passes(seconds: float, of_them_queued: float) -> None:
        nonlocal now, queued
        for _ in range(round(seconds * 10)):
            now, queued = now + 0.1, queued + of_them_queued / seconds / 10
            made._look()

    passes(5.0, 4.5)
    assert killed == []
    passes(1.0, 0.0)
    assert len(killed) == 1
    killed.clear()
    last.heard, last.excused = now, 0.0
    passes(20.0, 20.0)
    assert killed == []
    passes(2.0, 2.0)
    assert len(killed) == 1
    killed.clear()
    monkeypatch.setattr(os, "fork", lambda: 7)
    made._start(last)
    last.ready, queued = True, 0.0  # of the process that was started again
    passes(5.0, 4.5)
    assert killed == []
    assert last.link is not None
    last.link.close()


def test_what_the_system_says_of_processors() -> None:
    """A process that does not exist has waited for none."""
    assert queued_seconds(os.getpid()) >= 0.0
    assert queued_seconds(None) == 0.0
    busy, waited = list[int](), 0.0
    for _ in range(2 * len(os.sched_getaffinity(0)) + 1):
        if (pid := os.fork()) == 0:
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
            os._exit(0)
        busy.append(pid)
    for pid in busy:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        waited += queued_seconds(pid)
        os.waitpid(pid, 0)
    assert waited > 0.0
