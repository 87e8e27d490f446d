"""kill -9 of a worker with streams, by chance: the others don't notice, its KV is released, its
load counts no more; and of the scheduler process, which nobody notices.
"""

# PDPROXY_TEST_KILLS: how many times, 50 in `.ci/full`. With it no request may wait for a scheduler
# process for longer than the product lets it.

from __future__ import annotations

import asyncio
import os
import platform
import random
import re
import signal
from pathlib import Path

import pytest

from tests.fakes import answers, scripts
from tests.fakes.client import Answer, Client, exchange, request
from tests.fakes.engine import serve
from tests.fakes.process import PATIENCE, Served, longest_wait, served
from tests.fakes.samples import read, total
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, completion, until

KILLS = int(os.environ.get("PDPROXY_TEST_KILLS", "2"))
STREAMS = 50
LEASE = 3600.0
"""Seconds: a prefill engine that frees KV within a test does so because it was told."""
_WORKER = re.compile(rb'"id":"cmpl-(\d\d)')


async def _stream(port: int) -> Answer | None:
    """A stream's answer as far as it came; None: the connection ended before its head."""
    try:
        client = await Client.connect(port)
    except OSError:
        return None
    answer: Answer | None = None
    try:
        client.post(COMPLETIONS, completion(stream=True))
        answer = await client.head()
        return await client.rest(answer)
    except (ConnectionError, EOFError, asyncio.IncompleteReadError):
        return answer
    finally:
        client.close()


def _scripted(proxy: Served, go: asyncio.Event, chance: random.Random) -> None:
    """Let requests stop at every stage until the test goes on: in their prefill, before the first
    token, in their stream.
    """

    proxy.prefill.scripts.clear()
    proxy.decode.scripts.clear()
    for _ in range(STREAMS):
        proxy.prefill.script(scripts.gate(go, serve) if chance.random() < 0.2 else serve)
        proxy.decode.script(
            chance.choice(
                [scripts.gate(go, serve), scripts.after_word(go, scripts.one_more_word), serve]
            )
        )


async def _load(proxy: Served) -> int:
    return int((await proxy.ask("GET", "/load")).json["server_load"])


async def _leases(proxy: Served) -> tuple[float, float]:
    """What the scheduler has leased, and what workers have of engines."""
    page = (await proxy.ask("GET", "/metrics")).body.decode()
    names = "pdproxy_scheduler_leases", "pdproxy_node_inflight"
    leased, had = [total(read(page, name), name, {}) for name in names]
    return leased, had


async def _balanced(proxy: Served) -> None:
    """Wait until the scheduler has leased what workers have."""
    async with asyncio.timeout(PATIENCE):
        while await proxy.metric("pdproxy_scheduler") != 1:
            await asyncio.sleep(0.02)
        while (found := await _leases(proxy))[0] != found[1]:
            await asyncio.sleep(0.02)


@pytest.mark.timeout(120 + 20 * KILLS)
async def test_a_killed_worker_leaves_nothing(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("PDPROXY_TEST_SEED", "7")))
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, facts={"lease": LEASE}) as proxy:
            assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
            freed = broken = 0
            for number in range(KILLS):
                go = asyncio.Event()
                _scripted(proxy, go, chance)
                streams = [asyncio.create_task(_stream(proxy.port)) for _ in range(STREAMS)]
                await asyncio.sleep(chance.random() * chance.choice([0.1, 1.0]))
                # one moment at which KV is held for sure, however slow the machine is
                if number == 0:
                    await until(lambda: _asked(proxy), PATIENCE)
                pids = proxy.workers()
                killed = chance.choice(pids)
                read = _killed(proxy, killed)
                held = set(proxy.books.held())
                await asyncio.sleep(chance.random() * 0.2)
                # what the dead one had is leased no more, while the others' streams go on
                await until(lambda: killed not in proxy.workers(), PATIENCE)  # noqa: B023
                await _balanced(proxy)
                go.set()
                done = await asyncio.gather(*streams)
                whole = [one for one in done if one is not None and one.status == 200 and one.ended]
                assert {one.text for one in whole} <= {TEXT, _scripted_text()}
                assert all(one.body.endswith(answers.DONE) for one in whole)
                # Only streams of the one worker are broken; every other one is whole.
                parts = [one for one in done if one is not None and not one.ended]
                workers = {found[1] for one in parts if (found := _WORKER.search(one.body))}
                assert len(workers) <= 1, workers
                assert all(one.status == 200 for one in parts)
                broken += STREAMS - len(whole)
                await until(
                    lambda: killed not in proxy.workers() and len(proxy.workers()) == 2,  # noqa: B023
                    PATIENCE,
                )
                freed += len(held - await _freed(proxy, read))
                async with asyncio.timeout(PATIENCE):
                    while await _load(proxy) or await _leases(proxy) != (0, 0):
                        await asyncio.sleep(0.02)
            assert broken > 0
            assert freed > 0
            assert await proxy.metric("pdproxy_worker_restarts_total") == KILLS
            assert not proxy.books.unknown
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.process.wait() == 0


@pytest.mark.timeout(120 + 20 * KILLS)
async def test_a_killed_scheduler_breaks_nothing(tmp_path: Path) -> None:
    """Whatever streams are at: all are whole, and no KV is left. New ones get engines of its
    successor; each third time, of the one behind that.
    """
    chance = random.Random(int(os.environ.get("PDPROXY_TEST_SEED", "7")))
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, facts={"lease": LEASE}, interval=0.2) as proxy:
            kills = 0
            for number in range(KILLS):
                go = asyncio.Event()
                _scripted(proxy, go, chance)
                streams = [asyncio.create_task(_stream(proxy.port)) for _ in range(STREAMS)]
                await asyncio.sleep(chance.random() * chance.choice([0.1, 1.0]))
                killed = proxy.scheduler()
                assert killed is not None
                os.kill(killed, signal.SIGKILL)
                kills += 1
                streams += [asyncio.create_task(_stream(proxy.port)) for _ in range(STREAMS // 5)]
                # else all that goes on does so without one
                if number % 2 or number % 3 == 1:
                    await until(lambda: proxy.scheduler() not in (None, killed), PATIENCE)  # noqa: B023
                if number % 3 == 1:  # before it chooses
                    killed = proxy.scheduler()
                    assert killed is not None
                    os.kill(killed, signal.SIGKILL)
                    kills += 1
                if number % 2 == 0:
                    await _balanced(proxy)
                go.set()
                done = [one for one in await asyncio.gather(*streams) if one is not None]
                assert [one.status for one in done] == [200] * len(streams), [
                    one.body for one in done if one.status != 200
                ]
                assert all(one.ended and one.body.endswith(answers.DONE) for one in done)
                await until(lambda: not proxy.books.held(), PATIENCE)
                async with asyncio.timeout(PATIENCE):
                    while await _load(proxy):  # a client has the end before its request has ended
                        await asyncio.sleep(0.02)
                    while await proxy.metric("pdproxy_scheduler") != 1 or await _leases(proxy) != (
                        0,
                        0,
                    ):
                        await asyncio.sleep(0.02)
            assert await proxy.metric("pdproxy_scheduler_restarts_total") == kills
            assert await proxy.metric("pdproxy_worker_restarts_total") == 0
            assert not proxy.books.unknown
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.process.wait() == 0
    wait = longest_wait(tmp_path / "log")
    print(f"{kills} kills of the scheduler process: engines were chosen again within {wait:.2f} s")


def _asked(proxy: Served) -> list[str]:
    """The handles that are held, and that a decode engine was asked with."""
    return [name for name in proxy.books.held() if proxy.books.history[name] != ["given"]]


def _killed(proxy: Served, worker: int) -> set[str]:
    """Kill a worker. Return the ids of all prefill requests so far whose answers were read.

    The engines are in this process, so between the stop and the end nothing is sent. An answer is
    read if the engine has sent it, and no byte of it is left in the system's memory of the worker's
    connection. A worker that is stopped at work may have read one and not processed it: then none
    is returned.
    """
    os.kill(worker, signal.SIGSTOP)
    while Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        pass
    sim = proxy.prefill.sim
    ports = {one.number: one.wire.get_extra_info("peername")[1] for one in sim._open()}
    waiting = {port for port, size in _received(sim.port).items() if size}
    read = {
        one.ident for one in sim.requests if one.over and ports.get(one.connection) not in waiting
    }
    if Path(f"/proc/{worker}/syscall").read_text().split()[0] not in _WAITS:
        read = set()
    os.kill(worker, signal.SIGKILL)
    return read


_WAITS = {"232", "281", "441"} if platform.machine() == "x86_64" else {"22", "441"}
"""The numbers of the calls of the system in which an event loop waits: epoll_wait, epoll_pwait,
epoll_pwait2.
"""


def _received(port: int) -> dict[int, int]:
    """The bytes that wait to be read on each connection to a port, by the client's port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    to_it = [row for row in rows if row[2].endswith(f":{port:04X}")]
    return {int(row[1].split(":")[1], 16): int(row[4].split(":")[1], 16) for row in to_it}


async def _freed(proxy: Served, read: set[str]) -> set[str]:
    """Wait until no KV is held but that of answers which the killed worker had not processed. Free
    that; return its handles.

    Only a prefill engine's answer names its KV: one that the engine had not sent, or that was on
    its way, names it to nobody. Engines may also make KV behind the kill, for requests that they
    had not read before.
    """

    def known() -> list[str]:
        """Handles of answers that were processed, and those that a decode engine was asked with."""
        asked = _asked(proxy)
        return [
            name for name in proxy.books.held() if name in asked or any(one in name for one in read)
        ]

    try:
        await until(lambda: not known(), PATIENCE)
    except TimeoutError:
        raise AssertionError({name: proxy.books.history[name] for name in known()}) from None
    # requests that were under way elsewhere are completed within a second or two
    async with asyncio.timeout(PATIENCE):
        for _ in range(60):
            if not proxy.books.held():
                return set()
            await asyncio.sleep(0.05)
    assert not known()
    left = set(proxy.books.held())
    assert len({name.split("-")[1][:2] for name in left}) == 1, "only one worker was killed"
    for name in left:
        proxy.books.free(proxy.books.params[name])
    return left


def _scripted_text() -> str:
    return Answer(200, body=WORD + WORD).text


async def test_a_worker_killed_with_a_handle_has_it_released_by_another(tmp_path: Path) -> None:
    """A decode engine has been asked and has shown nothing: the other worker has the KV released,
    by a request of its own.
    """
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, facts={"lease": LEASE}) as proxy:
            proxy.decode.script(scripts.stall)
            asking = asyncio.create_task(_stream(proxy.port))
            await until(lambda: proxy.decode.requests)
            (held,) = proxy.books.held()
            worker = proxy.serves_client()
            proxy.books.free = lambda params: None  # type: ignore[method-assign]  # the decode engine frees nothing itself
            os.kill(worker, signal.SIGKILL)
            await until(lambda: not proxy.books.held(), PATIENCE)
            assert await asking is None
            assert "released" in proxy.books.history[held]
            assert (
                next(one.kv["remote_request_id"] for one in proxy.decode.releases if one.kv) == held
            )
            assert await _load(proxy) == 0
            assert (await exchange(proxy.decode.port, request("GET", "/health", b""))).status == 200
