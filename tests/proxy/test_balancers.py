"""Balancers in front of the proxy, with the configurations of docs/guide/load-balancers.md. Needs `nginx` and `haproxy`."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes import scripts
from tests.fakes.client import Answer, Client
from tests.fakes.ports import free_port
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "load-balancers.md").read_text()
FRAME = {
    "nginx": "daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\nhttp {{ access_log off;\n"
    "client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; "
    "scgi_temp_path {folder}/e;\n{config}\n}}\n",
    "haproxy": "{config}\n",
}
DEFAULTS = {
    "nginx": "server { listen 127.0.0.1:8080; location / { proxy_pass http://127.0.0.1:8000; } }",
    "haproxy": "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
    "frontend f\n bind 127.0.0.1:8080\n default_backend b\nbackend b\n server one 127.0.0.1:8000\n",
}


def found(name: str) -> str:
    path = os.environ.get(f"PDPROXY_TEST_{name.upper()}") or shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        pytest.skip(f"no {name} here")
    return path


def of_page(name: str) -> str:
    return re.findall(rf"```{name}\n(.*?)```", PAGE, re.DOTALL)[0]


@asynccontextmanager
async def balanced(name: str, config: str, w: World, folder: Path) -> AsyncIterator[int]:
    """Run a balancer in front of a proxy; its port."""
    program, port = found(name), free_port()
    config = config.replace("127.0.0.1:8000", f"127.0.0.1:{w.port}").replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    path = folder / "config"
    path.write_text(FRAME[name].format(folder=folder, config=config))
    arguments = ["-c", str(path), "-p", str(folder)] if name == "nginx" else ["-f", str(path), "-db"]
    process = await asyncio.create_subprocess_exec(program, *arguments)
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    (await Client.connect(port)).close()
                    break
                except OSError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def _ask(port: int, **fields: object) -> Answer:
    client = await Client.connect(port)
    client.post(COMPLETIONS, completion(**fields))
    answer = await client.answer()
    client.close()
    return answer


@pytest.mark.parametrize("name", FRAME)
@pytest.mark.parametrize("is_default", [False, True])
async def test_a_balancer_in_front(name: str, is_default: bool, tmp_path: Path) -> None:
    """Each event comes through as it is sent; a failed stream spoils no other request."""
    # Without health checks: on a busy machine some fail, and the balancer answers itself for a while.
    config = DEFAULTS[name] if is_default else of_page(name).replace(" check\n", "\n")
    async with world() as w, balanced(name, config, w, tmp_path) as port:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        client = await Client.connect(port)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert head.status == 200
        assert WORD in await client.piece()  # the engine sends nothing more before it is told to
        go.set()
        assert (await client.rest(head)).ended
        w.decode[0].script(scripts.streams(WORD))
        failed = await _ask(port, stream=True)
        assert b'"error"' in failed.body
        for _ in range(4):
            assert (await _ask(port)).text == TEXT


async def test_haproxy_sends_no_more_to_a_proxy_that_leaves(tmp_path: Path) -> None:
    """While it notices, requests are served; then it answers itself."""
    async with world() as w, balanced("haproxy", of_page("haproxy"), w, tmp_path) as port:
        async with asyncio.timeout(60):
            while (await _ask(port)).status != 200:  # a health check was late
                await asyncio.sleep(0.1)
        w.proxy.leave(w.connections)
        statuses = [(await _ask(port)).status]
        async with asyncio.timeout(60):
            while statuses[-1] == 200:
                await asyncio.sleep(0.1)
                statuses.append((await _ask(port)).status)
        assert set(statuses) == {200, 503}
        served = len(w.decode[0].requests)
        assert (await _ask(port)).status == 503
        await until(lambda: len(w.decode[0].requests) == served)
