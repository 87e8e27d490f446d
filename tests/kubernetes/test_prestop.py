"""The preStop hook of engines' pods, against proxies and an engine that answer as they are told."""

# Each proxy is one address of the loopback network, as each pod is an address of its own.

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.chart.generate import HOOK
from tests.fakes.ports import free_port

POD = "127.0.0.40"
FIRST, SECOND = "127.0.0.41", "127.0.0.42"
Told: TypeAlias = "tuple[int, str] | None"
"""The status and the body of an answer; None: no answer."""
DRAINED: Told = (200, '{"drained":true}')
NOT_YET: Told = (409, '{"drained":false,"requests":2,"handles":1}')
BUSY: Told = (200, 'vllm:num_requests_running{engine="0",model_name="m"} 1.0\n')
WAITING: Told = (
    200,
    'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 12.0\n',
)
NO_REQUESTS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:request_success_total{engine="0"} 7.0
"""
IDLE: Told = (200, NO_REQUESTS)
TOOLS = ("sh", "getent", "timeout", "date", "sleep")
LONG = 600
"""Seconds that no test waits."""


@dataclass
class Answering:
    """What answers at one address: one of `answers` after the other, the last one for ever."""

    answers: list[Told]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.split()[1])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await reader.read()  # until the hook gives up
        else:
            status, body = answer
            head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            writer.write(f"{head}\r\n{body}".encode())
        writer.close()


@dataclass
class Ended:
    """How the hook has ended: its exit code, what it has said, and which paths were asked of each
    proxy.
    """

    code: int | None
    said: str
    asked: list[list[str]]


async def hook(
    proxies: Sequence[Sequence[Told]],
    engine: Sequence[Told] = (IDLE,),
    *,
    tools: Path | None = None,
    script: Path = HOOK,
    **variables: object,
) -> Ended:
    """Run the hook. Nothing listens where there are no answers. `tools`: the folder of all
    programs that the hook finds; `script`: where the hook is.
    """
    port, served = free_port(), [Answering([*answers]) for answers in proxies]
    places = [f"127.0.0.{41 + number}" for number in range(len(served))]
    async with AsyncExitStack() as stack:
        for one, place in [*zip(served, places, strict=True), (Answering([*engine]), POD)]:
            if one.answers:
                server = await asyncio.start_server(one, place, port)
                stack.callback(server.close)
        environment = {
            "PATH": str(tools or os.environ["PATH"]),
            # Names may share addresses.
            "PDPROXY_SERVICES": " ".join(f"http://{one}:{port}" for one in places * 2),
            "POD_IP": POD,
            "ENGINE_PORT": str(port),
            "PAUSE": "0.05",
            "TIMEOUT": "2",
            "KV_SECONDS": str(LONG),
            "DRAIN_SECONDS": str(LONG),
            "http_proxy": "http://127.0.0.99:1",  # is for what is outside of the cluster
            **{name: str(value) for name, value in variables.items()},
        }
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", str(script)), env=environment, stdout=asyncio.subprocess.PIPE, stderr=-2
        )
        try:
            async with asyncio.timeout(60):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    asked = [[path.replace(f":{port}", ":PORT") for path in one.asked] for one in served]
    return Ended(process.returncode, said.decode().replace(f":{port}", ":PORT"), asked)


def only(folder: Path, *names: str) -> Path:
    """A folder that has no other programs."""
    for name in (*TOOLS, *names):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


async def test_it_ends_once_all_proxies_say_so() -> None:
    """In three rounds: an engine that has just become ready may come in between."""
    ended = await hook([[DRAINED], [DRAINED]])
    assert (ended.code, ended.said) == (0, f"preStop: {POD}:PORT is drained\n")
    assert ended.asked == [[f"/drained?engine={POD}:PORT"] * 3] * 2


@pytest.mark.parametrize(
    ("proxies", "engine"),
    [
        ([[NOT_YET] * 4 + [DRAINED]], [IDLE]),
        ([[DRAINED], [NOT_YET] * 4 + [DRAINED]], [IDLE]),
        ([[NOT_YET] * 4 + [DRAINED], [DRAINED]], [IDLE]),
        ([[DRAINED, DRAINED, NOT_YET, NOT_YET, DRAINED]], [IDLE]),
        ([[DRAINED]], [BUSY] * 4 + [IDLE]),
        ([[DRAINED]], [WAITING] * 4 + [IDLE]),
        ([[DRAINED]], [IDLE, IDLE, WAITING, WAITING, IDLE]),
        ([[(503, "")] * 4 + [DRAINED]], [IDLE]),
        ([[DRAINED], [(404, "")] * 4 + [DRAINED]], [IDLE]),
    ],
)
async def test_it_waits_for_what_is_left(
    proxies: Sequence[Sequence[Told]], engine: Sequence[Told]
) -> None:
    """At any proxy, and at the engine itself: requests that came from others."""
    ended = await hook(proxies, engine)
    assert ended.code == 0
    assert ended.said.endswith("is drained\n")
    assert [len(asked) for asked in ended.asked] == [7] * len(proxies)


async def test_a_proxy_that_does_not_answer_may_have_kv_here() -> None:
    """One that refuses, one that is silent, and none at all: the engine must be without requests
    for as long as it keeps KV.
    """
    for proxies, why in (
        ([[DRAINED], []], f"http://{SECOND}:PORT does not answer"),
        ([[None]], f"http://{FIRST}:PORT does not answer"),
        ([], "no proxy was found"),
    ):
        ended = await hook(proxies, KV_SECONDS=1, TIMEOUT=0.3)
        assert (ended.code, ended.said.count(why)) == (0, 2), ended.said
        assert "has had no requests for 1 s" in ended.said


async def test_a_name_that_nobody_knows_is_no_proxy() -> None:
    ended = await hook([], PDPROXY_SERVICES="http://no-such-service.invalid:8000", KV_SECONDS=0)
    assert (ended.code, "no proxy was found" in ended.said) == (0, True)


async def test_requests_begin_that_time_anew() -> None:
    ended = await hook([], [IDLE, BUSY], KV_SECONDS=1, DRAIN_SECONDS=3)
    assert (ended.code, "the engine has requests" in ended.said) == (1, True)


@pytest.mark.parametrize("engine", [[IDLE], [BUSY], [None]])
async def test_it_gives_up(engine: Sequence[Told]) -> None:
    """And says what is left, for the event that Kubernetes shows."""
    ended = await hook([[NOT_YET]], engine, DRAIN_SECONDS=1, TIMEOUT=0.3)
    assert ended.code == 1
    last = ended.said.splitlines()[-1]
    assert "was not drained in 1 s" in last
    assert "the engine has requests" in last or '"requests":2,"handles":1' in last


@pytest.mark.parametrize("engine", [[], [(500, "")], [(200, "")]])
async def test_an_engine_that_shows_nothing_is_drained_by_the_proxies_word(
    engine: Sequence[Told],
) -> None:
    """It has ended already, or reports no statistics."""
    ended = await hook([[NOT_YET, DRAINED]], engine)
    assert (ended.code, len(ended.asked[0])) == (0, 4)


async def test_without_its_address_it_ends_at_once() -> None:
    ended = await hook([[DRAINED]], POD_IP="")
    assert (ended.code, ended.said) == (1, "preStop: POD_IP is not set\n")


async def test_an_address_of_ipv6() -> None:
    ended = await hook([[DRAINED]], POD_IP="fd00::40", TIMEOUT=0.2)
    assert ended.asked == [["/drained?engine=[fd00::40]:PORT"] * 3]


@pytest.mark.parametrize("state", [[NOT_YET, DRAINED], [(500, ""), DRAINED]])
async def test_without_curl_it_asks_with_python(state: Sequence[Told], tmp_path: Path) -> None:
    """vLLM's images have both."""
    tools = only(tmp_path, "python3")
    ended = await hook([state], [BUSY, IDLE], tools=tools)
    assert (ended.code, len(ended.asked[0])) == (0, 4), ended.said


async def test_without_both_it_waits_for_the_kv(tmp_path: Path) -> None:
    ended = await hook([[DRAINED]], tools=only(tmp_path), KV_SECONDS=1)
    assert (ended.code, ended.asked) == (0, [[]])
    assert "has had no requests for 1 s" in ended.said


async def test_variables_beside_it_win(tmp_path: Path) -> None:
    """Proxies may have come and gone since the engine was started."""
    script = tmp_path / "prestop.sh"
    shutil.copy(HOOK, script)
    (tmp_path / "variables").write_text("PDPROXY_SERVICES=''\n")
    ended = await hook([[NOT_YET]], script=script, KV_SECONDS=0)
    assert (ended.code, ended.asked) == (0, [[]])
