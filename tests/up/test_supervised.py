"""A process that is kept running: when it is started again, when no more; what it says of its
start; and the order of changes.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdproxy_lab.up.arrangement import PlannedEngine
from pdproxy_lab.up.changes import Orders, in_order, refuse_other, submit
from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.loading import STAGES, stage_of
from pdproxy_lab.up.own_process import OwnProcess
from pdproxy_lab.up.state import Folder, State
from pdproxy_lab.up.supervised import Supervised, Times
from tests.fakes.ports import free_port
from tests.up.machines import machine, planned

TIMES = Times(
    look=0.01, ready=0.5, pauses=(0.0, 0.01), most=3, window=60, health=0.02, dead=0.1, answer=0.2
)


class Health:
    """Answers for an engine."""

    def __init__(self) -> None:
        self.status = 200
        self.url = ""


@pytest.fixture
async def health() -> AsyncIterator[Health]:
    found = Health()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=found.status)

    app = web.Application()
    app.router.add_get("/health", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    found.url = f"http://127.0.0.1:{port}/health"
    yield found
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


def kept(folder: Path, health: str, line: str, said: list[str], **times: Any) -> Supervised:
    process = OwnProcess("any-0", Folder(folder))
    command = EngineCommand(("sh", "-c", line), {"OWN": "1"})
    used = dataclasses.replace(TIMES, **times)
    return Supervised(
        process, command, health, health, {"PATH": "/bin:/usr/bin"}, said.append, used
    )


async def test_a_crash_loop_ends_with_its_reason(
    tmp_path: Path, health: Health, session: aiohttp.ClientSession
) -> None:
    said: list[str] = []
    one = kept(tmp_path, health.url, "echo out of luck $OWN; exit 3", said)
    one.start()
    async with asyncio.timeout(60):
        await one.keep(session)
    assert one.is_given_up
    assert said[0].startswith("any-0 ended with exit code 3, and starts again in 0 s; its log, ")
    assert "3 times within 1 minutes: it is not started again" in said[-1]
    assert said[-1].endswith("out of luck 1")


async def test_one_whose_remains_can_not_be_ended_is_given_up(
    tmp_path: Path,
    health: Health,
    session: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise UpError("the system does not end its processes: 7")

    said: list[str] = []
    one = kept(tmp_path, health.url, "exit 3", said)
    one.start()
    with monkeypatch.context() as patched:
        patched.setattr(OwnProcess, "stop", fail)
        async with asyncio.timeout(60):
            await one.keep(session)
    assert one.is_given_up
    assert said[-1].endswith("processes: 7: any-0 is not started again")


async def test_an_engine_whose_core_is_dead_is_started_again(
    tmp_path: Path, health: Health, session: aiohttp.ClientSession
) -> None:
    said: list[str] = []
    one = kept(tmp_path, health.url, "echo begun; exec sleep 600", said, ready=60)
    one.start()
    await one.until_ready(session)
    first = one.process.pid
    health.status = 503
    keeping = asyncio.create_task(one.keep(session))
    async with asyncio.timeout(60):
        while not any("says that its core is dead" in text for text in said):
            await asyncio.sleep(0.01)
        health.status = 200
        while not any("ready" in text for text in said[1:]):
            await asyncio.sleep(0.01)
    assert one.process.pid != first
    assert not one.is_given_up
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await one.stop(asyncio.Event())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("exec sleep 600", "was not ready within 0.5 s (--wait); its log, "),
        ("echo no; exit 7", "ended with exit code 7 while it started; its log, "),
    ],
)
async def test_a_start_has_a_deadline(
    tmp_path: Path, health: Health, session: aiohttp.ClientSession, line: str, told: str
) -> None:
    health.status = 500
    one = kept(tmp_path, health.url, line, [])
    one.start()
    with pytest.raises(UpError) as failed:
        await one.until_ready(session)
    assert told in str(failed.value)
    await one.stop(asyncio.Event())


def test_stages_are_read_from_logs() -> None:
    lines = [
        "(EngineCore pid=9) INFO 11-30 [gpu_model_runner.py:5040] Starting to load model org/m...",
        "(EngineCore pid=9) INFO 11-30 [gpu_model_runner.py:5150] Model loading took 15.2 GiB",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%",
    ]
    stages = [stage_of(lines[: count + 1]) for count in range(3)]
    assert [STAGES[stage][0] for stage in stages] == ["loads the weights", "compiles", "warms up"]
    assert stage_of(lines[:1], before=3) == 3
    assert stage_of(["nothing of these"]) == -1


def engine(name: str) -> PlannedEngine:
    role: Any = name.split("-")[0]
    return PlannedEngine(name, role, (int(name[-1]),), 8200, 5600, 5700)


def test_changes_keep_a_pair_of_each_kind() -> None:
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert in_order([engine(name) for name in names]) == [
        "prefill-0",
        "decode-0",
        "prefill-1",
        "decode-1",
        "decode-2",
    ]


def state(**changes: Any) -> State:
    plan = planned(machine(2))
    given = {
        "boot": "b",
        "model": "m",
        "engines": plan.engines,
        "events_port": plan.events_port,
        "commands": {one.name: EngineCommand(("vllm",), {}) for one in plan.engines},
        "settings": "",
        "port": 8000,
        **changes,
    }
    return State(**given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "n"}, "can't change the model (m runs)"),
        ({"port": 8001}, "can't change the proxy's port (8000)"),
        ({"engines": ()}, "can't change the engines, their GPUs and ports (any-0, any-1 run)"),
    ],
)
def test_what_can_not_be_changed_is_refused(change: dict[str, Any], told: str) -> None:
    refuse_other(state(), state(settings="x"))
    with pytest.raises(UpError) as refused:
        refuse_other(state(), state(**change))
    assert told in str(refused.value)


async def test_orders_are_made_one_at_a_time(tmp_path: Path) -> None:
    folder, goes_on = Folder(tmp_path), asyncio.Event()

    async def make(wanted: State, say: Any) -> None:
        say(f"changes {wanted.model}")
        await goes_on.wait()
        if wanted.model == "bad":
            raise UpError("no such model")

    with pytest.raises(UpError, match="takes no changes: it does not serve yet"):
        await submit(folder, state(), print)
    orders = Orders(folder, make)
    await orders.start()
    said: list[str] = []
    first = asyncio.create_task(submit(folder, state(model="bad"), said.append))
    async with asyncio.timeout(60):
        while not said:
            await asyncio.sleep(0.01)
        with pytest.raises(UpError, match="another change is being made"):
            await submit(folder, state(), print)
        goes_on.set()
        with pytest.raises(UpError, match="no such model"):
            await first
        await submit(folder, state(model="good"), said.append)
    assert said == ["changes bad", "changes good"]
    reader, writer = await asyncio.open_unix_connection(str(folder.orders))
    writer.write(b"{}\n")
    assert b"can't be read" in await reader.readline()
    writer.close()
    orders.close()
