"""Balancers in front of the proxy, with the configurations of docs/guide/processes.md:
streams, rates and ends pass them.
"""

# Needs `nginx`, `haproxy`, `envoy`: where one of the programs is missing, its tests are skipped,
# but for PDPROXY_REQUIRE_BALANCERS=1: then they fail. `long_balancers.py` has restarts behind them.

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.client import Answer, Client, exchange, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import prefill
from tests.fakes.ports import free_port
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, completion, until, world

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "processes.md"
PAGE = GUIDE.read_text().partition("## Behind a load balancer")[2]
FRAME = {
    "nginx": "daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\nhttp {{ "
    "access_log off;\n"
    "client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; "
    "uwsgi_temp_path {folder}/d; "
    "scgi_temp_path {folder}/e;\n{config}\n}}\n",
    "haproxy": "{config}\n",
    "envoy": "{config}\n",
}
LANGUAGE = {"nginx": "nginx", "haproxy": "haproxy", "envoy": "yaml"}
"""Of its block in the page."""
DEFAULTS = {
    "nginx": "server { listen 127.0.0.1:8080; location / { proxy_pass http://127.0.0.1:8000; } }",
    "haproxy": "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"  # noqa: E501
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    "frontend f\n bind 127.0.0.1:8080\n default_backend b\nbackend b\n server one 127.0.0.1:8000\n",
    "envoy": """static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: 8080}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          route_config: {virtual_hosts: [{name: a, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: pdproxy}}]}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: pdproxy
    load_assignment:
      cluster_name: pdproxy
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8000}}}
""",  # noqa: E501
}


def found(name: str) -> str:
    path = (
        os.environ.get(f"PDPROXY_TEST_{name.upper()}")
        or shutil.which(name)
        or shutil.which(name, path="/usr/sbin")
    )
    if path is None:
        assert "PDPROXY_REQUIRE_BALANCERS" not in os.environ, f"no {name} here"
        pytest.skip(f"no {name} here")
    return path


def of_page(name: str) -> str:
    found: str = re.findall(rf"```{LANGUAGE[name]}\n(.*?)```", PAGE, re.DOTALL)[0]
    return found


def unchecked(config: str) -> str:
    """A configuration without health checks: on a busy machine some fail, and the balancer answers
    itself for a while.
    """
    return re.sub(r"    health_checks:\n(    [- ] .*\n)+", "", config.replace(" check\n", "\n"))


def at_ports(config: str, own: int, proxy: int) -> str:
    """A configuration with other ports than those of the page: the balancer's own, and the
    proxy's.
    """
    for old, new in ((8000, proxy), (8080, own)):
        config = config.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}").replace(
            f"port_value: {old}", f"port_value: {new}"
        )
    return config


@asynccontextmanager
async def balanced(name: str, config: str, proxy: int, folder: Path) -> AsyncIterator[int]:
    """Run a balancer in front of the proxy at a port; its own port."""
    program, port = found(name), free_port()
    path = folder / "config.yaml"
    path.write_text(FRAME[name].format(folder=folder, config=at_ports(config, port, proxy)))
    arguments = {
        "nginx": ["-c", str(path), "-p", str(folder)],
        "haproxy": ["-f", str(path), "-db"],
        "envoy": [
            "-c",
            str(path),
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--log-level",
            "error",
        ],
    }[name]
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
    return await exchange(port, request("POST", COMPLETIONS, completion(**fields)))


@pytest.mark.parametrize("name", FRAME)
@pytest.mark.parametrize("is_default", [False, True])
async def test_a_balancer_in_front(name: str, is_default: bool, tmp_path: Path) -> None:
    """Each event comes through as it is sent; a failed stream spoils no other request."""
    config = DEFAULTS[name] if is_default else unchecked(of_page(name))
    async with world() as w, balanced(name, config, w.port, tmp_path) as port:
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


@pytest.mark.parametrize("name", FRAME)
@pytest.mark.parametrize("is_default", [False, True])
async def test_a_slow_prefill_behind_a_balancer(
    name: str, is_default: bool, tmp_path: Path
) -> None:
    """The comments of a stream that is silent come through at once, and then each event."""
    config, go, clock = (
        DEFAULTS[name] if is_default else unchecked(of_page(name)),
        asyncio.Event(),
        ManualClock(),
    )
    async with (
        world(clock=clock, adjust=commented) as w,
        balanced(name, config, w.port, tmp_path) as port,
    ):
        w.prefill[0].script(scripts.gate(go, prefill))
        client = await Client.connect(port)
        client.post(COMPLETIONS, completion(stream=True))
        await until(lambda: w.prefill[0].requests)
        for number in range(3):
            await clock.advance(15.0)
            if not number:
                head = await client.head()
                assert head.status == 200
            assert (await client.piece()).startswith(b":")
        go.set()
        answer = await client.rest(head)
        assert (answer.text, answer.ended) == (TEXT, True)


def commented(settings: Settings) -> Settings:
    replace = msgspec.structs.replace
    return replace(
        settings,
        deadlines=replace(settings.deadlines, prefill=600.0, total=1800.0, stream_comment=15.0),
    )


async def test_haproxy_sends_no_more_to_a_proxy_that_leaves(tmp_path: Path) -> None:
    """While it notices, requests are served; then it answers itself."""
    async with world() as w, balanced("haproxy", of_page("haproxy"), w.port, tmp_path) as port:
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
