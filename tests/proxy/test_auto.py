"""Connector auto: what engines are asked at the start, what that leaves on them, and what stops the
start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from pdproxy.app.detection import KEY, look, settled
from pdproxy.app.server import serve
from pdproxy.app.signals import Ending
from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet import detection
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.keys import Auth
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.transfer.registry import AUTO
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.check.engines import listening
from tests.fakes.client import exchange, request
from tests.fakes.clock import ManualClock
from tests.fakes.forked import piped
from tests.fakes.ports import free_port
from tests.fakes.world import COMPLETIONS, completion, until

FAST = Hardware(speed=0)
LONG = 60.0
WHICH = "the engines do not show which of these they run"


def settings(
    prefills: list[str], decodes: list[str], *, key: str | None = None, **more: Any
) -> Settings:
    """Settings with connector auto. `more`: of the pool."""
    engines = [ConfiguredEngine(url=url, role="prefill") for url in prefills] + [
        ConfiguredEngine(url=url, role="decode") for url in decodes
    ]
    pool = Pool(**{"connector": AUTO, "nodes": tuple(engines), **more})
    return Settings(
        pools=(pool,), deadlines=Deadlines(detect=LONG, probe=10), auth=Auth(engine_api_key=key)
    )


@asynccontextmanager
async def engines(
    p: Mapping[str, Any] | None = None, d: Mapping[str, Any] | None = None
) -> AsyncIterator[list[SimServer]]:
    """Run one prefill and one decode engine. `p`, `d`: their facts."""
    async with AsyncExitStack() as stack:
        sides = [("prefill", p or {}), ("decode", d or {})]
        yield [
            await stack.enter_async_context(
                SimServer(
                    SimFacts(
                        **{"role": role, "hardware": FAST, "kv_lease_duration": 600.0, **facts}
                    ),
                    chance=1,
                )
            )
            for role, facts in sides
        ]


async def mistakes(made: Settings, clock: ManualClock | None = None) -> tuple[str, ...]:
    """Find the connector, which must fail; return the lines of the error."""
    with pytest.raises(SettingsError) as caught:
        await settled(made, clock)
    return caught.value.mistakes


async def test_nixl_is_found_and_nothing_is_left_at_the_prefill_engine() -> None:
    """The decode engine has had no contact with it: it is asked twice."""
    async with engines() as (p, d):
        found = await settled(settings([p.url], [d.url]))
        assert found.pool.connector == "nixl"
        await until(lambda: not p.engine.handles)
        assert len(p.requests) == 1
        assert len(d.releases) == 2
        assert not d.requests, "no decode engine generates for this"


async def test_engines_for_any_role_show_it_too() -> None:
    """Each is asked as a prefill engine, and the next one releases what it keeps because of
    that.
    """
    async with engines({"role": "any"}, {"role": "any"}) as (a, b):
        nodes = tuple(ConfiguredEngine(url=one.url, role="any") for one in (a, b))
        found = await settled(settings([], [], nodes=nodes))
        assert found.pool.connector == "nixl"
        await until(lambda: not a.engine.handles and not b.engine.handles)
        assert [len(one.releases) for one in (a, b)] == [2, 2]


async def test_nixl_push_is_found_and_its_lease_ends_what_is_left() -> None:
    """Its prefill engines are not told of a refused request."""
    pushes = {"connector": "nixl-push", "kv_lease_duration": 0.5}
    async with engines(pushes, pushes) as (p, d):
        found = await settled(settings([p.url], [d.url]))
        assert found.pool.connector == "nixl-push"
        assert not d.releases
        await until(lambda: not p.engine.handles)


async def test_settings_that_name_a_connector_ask_nobody() -> None:
    made = settings(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], connector="shared")
    assert await settled(made) is made


async def test_a_pool_without_prefill_engines_asks_nobody() -> None:
    found = await settled(settings([], ["http://127.0.0.1:2"]))
    assert found.pool.connector != AUTO


async def test_what_cant_be_told_stops_the_start_with_all_that_was_asked() -> None:
    async with engines({"connector": "shared"}, {"connector": "shared"}) as (p, d):
        lines = await mistakes(settings([p.url], [d.url]))
        assert lines == (
            f"{KEY}: auto: {WHICH}: lmcache-pd or lmcache-mp or shared or moriio, or none. Name it",
            (
                f"prefill {p.url}: vLLM 0.32.0, /metrics has no KV connector, no Mooncake "
                f"bootstrap "
                f"server answered"
            ),
            f"decode {d.url}: vLLM 0.32.0, /metrics has no KV connector",
        )
        assert not p.requests, "LMCache's sender would crash"


async def test_engines_of_different_connectors() -> None:
    async with engines({}, {"connector": "none"}) as (p, d):
        first, *_ = await mistakes(settings([p.url], [d.url]))
        assert (
            f"engines of different connectors: {p.url} is nixl, {d.url} is mooncake or "
            f"lmcache-pd or" in first
        )
        # no decode engine of its kind could release it: the lease ends it
        await until(lambda: p.engine.handles, 5)


async def test_an_engine_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "PAUSE", 0.01)
    async with engines() as (p, d):
        await d.kill()
        asking = asyncio.create_task(settled(settings([p.url], [d.url])))
        await until(lambda: p.requests)
        await asyncio.sleep(0.05)
        assert not asking.done()
        await d.restart()
        assert (await asking).pool.connector == "nixl"


async def test_engines_that_are_down_stop_the_start_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detection, "PAUSE", 0.01)
    clock, (one, two) = ManualClock(), (f"http://127.0.0.1:{free_port()}" for _ in "pd")
    asking = asyncio.create_task(mistakes(settings([one], [two]), clock))
    await clock.reach(LONG)
    said, *of_engines = await asking
    assert said == f"{KEY}: auto: no prefill engine answered in 60 s"
    # The deadline may come while they are asked once more.
    whys = ("no connection: Connection refused", "no answer in time")
    assert len(of_engines) == 2
    for url, line in zip((one, two), of_engines, strict=True):
        assert line in [f"{url} was not asked: {why}" for why in whys]


async def test_one_engine_that_is_down_does_not_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the deadline the others decide; a warning names it."""
    monkeypatch.setattr(detection, "PAUSE", 0.01)
    clock, down = ManualClock(), f"http://127.0.0.1:{free_port()}"
    async with engines() as (p, d):
        asking = asyncio.create_task(settled(settings([p.url, down], [d.url]), clock))
        await until(lambda: p.requests and p.requests[0].over)
        await asyncio.sleep(0.1)
        await clock.reach(LONG)
        assert (await asking).pool.connector == "nixl"
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert warnings == [f"{down} was not asked: no connection: Connection refused"]


async def test_a_frozen_engine_ends_at_the_deadline() -> None:
    clock = ManualClock()
    async with engines() as (p, d):
        await p.freeze()
        asking = asyncio.create_task(mistakes(settings([p.url], [d.url]), clock))
        await until(lambda: any(one.path == "/server_info" for one in d.journal.others))
        await asyncio.sleep(0.1)
        await clock.reach(LONG)
        first, *_, last = await asking
        assert "no prefill engine answered" in first
        assert last == f"{p.url} was not asked: no answer in time"
        await p.thaw()


async def test_a_wrong_key_is_not_waited_for() -> None:
    async with engines({"api_key": "right"}, {"api_key": "right"}) as (p, d):
        first, *lines = await mistakes(settings([p.url], [d.url], key="wrong"))
        assert "no prefill engine answered" in first
        assert lines[0].startswith(
            f"{p.url} was not asked: /v1/models answered 401: set auth.engine_api_key"
        )
        assert (await settled(settings([p.url], [d.url], key="right"))).pool.connector == "nixl"


# -- engines that answer anything


def fake(**answers: Any) -> FastAPI:
    """An engine. `answers` by route: a body, or a status; those of vLLM without a connector for the
    others.
    """
    usual: dict[str, Any] = {
        "v1/models": {"data": [{"id": "m"}, {"id": "lora", "parent": "m"}]},
        "version": {"version": "0.32.0"},
        "metrics": "process_start_time_seconds 1.0\n",
        "server_info": 404,
        "v1/completions": 500,
    }
    usual |= {name.replace("__", "/"): value for name, value in answers.items()}
    app = FastAPI()
    app.state.asked = []

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str, request: Request) -> Response:
        app.state.asked.append((path, await request.body(), dict(request.headers)))
        found = usual.get(path, 404)
        if isinstance(found, int):
            return Response(b"{}", found)
        return Response(found if isinstance(found, bytes | str) else json.dumps(found))

    return app


NIXL_PAGE = "# TYPE vllm:nixl_xfer_time_seconds histogram\n"


def named(connector: str | None) -> dict[str, Any]:
    """What `/server_info` says in vLLM's development mode."""
    config = None if connector is None else {"kv_connector": connector, "kv_role": "kv_both"}
    return {
        "vllm_config": {"kv_transfer_config": config, "model_config": {}},
        "vllm_env": {},
        "system_env": {},
    }


async def found_with(p: FastAPI, d: FastAPI, **pool: Any) -> str | tuple[str, ...]:
    """The connector that two engines are taken for, or the lines of the error."""
    async with listening(p) as one, listening(d) as two:
        made = settings([one], [two], **pool)
        try:
            return (await settled(made)).pool.connector
        except SettingsError as error:
            return tuple(line.replace(one, "P").replace(two, "D") for line in error.mistakes)


async def test_a_configuration_that_the_engine_reports() -> None:
    """In the development mode nothing has to be guessed, and no prompt is sent."""
    p, d = (fake(server_info=named("ExampleConnector")) for _ in "pd")
    assert await found_with(p, d) == "shared"
    assert not [path for path, *_ in p.state.asked if path == "v1/completions"]
    none = fake(server_info=named(None))
    assert "P was started without a KV connector" in (await found_with(none, d))[0]
    other = fake(server_info=named("TheirConnector"))
    assert "no connector of pdproxy's serves TheirConnector of P" in (await found_with(other, d))[0]


async def test_the_settings_are_checked_for_what_was_found() -> None:
    p, d = (fake(server_info=named("ExampleConnector")) for _ in "pd")
    assert await found_with(p, d, tokenize="always") == (
        "pools[0].tokenize: connector shared takes no token ids: expected off or auto, got always",
    )


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (
            {"v1__completions": 500},
            "asked to keep KV it answered nothing: /v1/completions answered 500",
        ),
        (
            {"v1__completions": "no JSON"},
            "asked to keep KV it answered nothing: something else than a completion",
        ),
        (
            {"v1__completions": {"choices": []}},
            "asked to keep KV it answered kv_transfer_params = null",
        ),
        (
            {
                "v1__completions": '{"choices": [], "kv_transfer_params": ["\u202e'
                + "x" * 300
                + '"]}'
            },
            'kv_transfer_params = ["?',
        ),
        ({"version": 404}, None),
        ({"version": {"version": "x" * 500}, "v1__completions": 500}, f"vLLM {'x' * 99}"),
        ({"server_info": "no JSON", "v1__completions": 500}, "/metrics has vllm:nixl_*"),
        (
            {"server_info": {"vllm_config": "text"}, "v1__completions": 500},
            "/metrics has vllm:nixl_*",
        ),
        ({"server_info": {"vllm_config": {}}, "v1__completions": 500}, "/metrics has vllm:nixl_*"),
        ({"metrics": 404, "v1__completions": 500}, "no /metrics"),
    ],
)
async def test_answers_that_are_no_evidence(answers: dict[str, Any], line: str | None) -> None:
    """None stops the others' answers from being shown; what an engine wrote is cut and made
    printable.
    """
    found = None
    engine = fake(**{"metrics": NIXL_PAGE, **answers})
    async with listening(engine) as one:
        clock = ManualClock()
        looking = asyncio.create_task(look(settings([one], []), LONG, clock))
        while not looking.done() and line is not None:
            await asyncio.sleep(0.01)
        if line is None:  # not a version: it is asked again until the deadline
            await until(lambda: [path for path, _, _ in engine.state.asked].count("version") > 1)
            await clock.reach(LONG)
        found, silent = await looking
    if line is None:
        assert "/version answered 404" in silent[one]
    else:
        assert line in found.lines[0]
        assert all(len(text) < 700 and text.isprintable() for text in found.lines)


async def test_the_question_is_one_token_of_a_base_model_with_the_engines_key() -> None:
    answer = {
        "choices": [],
        "kv_transfer_params": {
            "remote_engine_id": "e",
            "remote_block_ids": [[1]],
            "transfer_mode": "pull",
        },
    }
    p, d = fake(metrics=NIXL_PAGE, v1__completions=answer), fake(metrics=NIXL_PAGE)
    async with listening(p) as one, listening(d) as two:
        found = await settled(settings([one], [two], key="secret"))
    assert found.pool.connector == "nixl"
    ((_, body, headers),) = [asked for asked in p.state.asked if asked[0] == "v1/completions"]
    sent = json.loads(body)
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("m", 1, False)
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    assert headers["authorization"] == "Bearer secret"
    assert not [asked for asked in d.state.asked if asked[0] == "v1/completions"], (
        "an incomplete handle is not sent"
    )


# -- the process


async def test_the_proxy_serves_what_it_has_found() -> None:
    async with engines({"model": "tiny"}, {"model": "tiny"}) as (p, d):
        from pdproxy.app.listening import listen

        ending = Ending()
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(serve(settings([p.url], [d.url]), listener, ending))
            ready = 503
            while ready != 200:
                ready = (await exchange(port, request("GET", "/ready", b""))).status
            answer = await exchange(
                port, request("POST", COMPLETIONS, completion(prompt="one two three four " * 20))
            )
            assert answer.status == 200
            assert d.engine.stats.prompt_tokens_by_source["external_kv_transfer"] > 0
            ending.requested.set()
            assert await serving == 0


@pytest.mark.parametrize(("hurried", "code"), [(False, 0), (True, 130)])
async def test_the_end_is_not_waited_for(hurried: bool, code: int) -> None:
    """SIGTERM while engines are awaited."""
    from pdproxy.app.listening import listen

    ending = Ending()
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(
            serve(settings([f"http://127.0.0.1:{free_port()}"], []), listener, ending)
        )
        await asyncio.sleep(0.05)
        assert not serving.done()
        if hurried:
            ending.at_once.set()
        ending.requested.set()
        assert await asyncio.wait_for(serving, 10) == code


async def test_the_exit_code_is_2_with_a_line_for_each_engine() -> None:
    async with engines({"connector": "shared"}, {"connector": "shared"}) as (p, d):
        process = await piped(
            *(
                "serve",
                "--connector",
                AUTO,
                "--port",
                str(free_port()),
                "--prefill",
                p.url,
                "--decode",
                d.url,
            ),
            env={**os.environ, "PDPROXY_LISTEN__LINGER": "0"},
        )
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
        assert process.returncode == 2
        lines = errors.decode().splitlines()
        assert f"pdproxy serve: {KEY}: auto: the engines do not show" in "\n".join(lines)
        assert [line for line in lines if line.startswith(f"pdproxy serve: prefill {p.url}")]
        assert not [line for line in lines if "Traceback" in line]


async def test_sigterm_while_engines_are_awaited() -> None:
    process = await piped(
        *("serve", "--connector", AUTO, "--port", str(free_port())),
        *("--prefill", f"127.0.0.1:{free_port()}", "--decode", f"127.0.0.1:{free_port()}"),
        env={**os.environ, "PDPROXY_LISTEN__LINGER": "0"},
    )
    async with asyncio.timeout(60):
        while b"Connection refused" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_what_is_left_is_released_at_the_host_of_the_settings() -> None:
    async with engines({"side_channel_host": "203.0.113.9"}) as (p, d):
        found = await settled(settings([p.url], [d.url], remote_host="url"))
        assert found.pool.connector == "nixl"
        await until(lambda: not p.engine.handles)


async def test_pools_are_asked_beside_each_other() -> None:
    """Each for its own connector; one that names it keeps it. A mistake names its pool, and ends
    the others' questions.
    """
    async with engines() as (p, d):
        nodes = (
            ConfiguredEngine(url="http://127.0.0.1:2", role="decode"),
            ConfiguredEngine(url="http://127.0.0.1:3", role="decode"),
        )
        named = Pool(name="named", connector="mooncake", nodes=nodes[:1])
        plain = Pool(name="plain", connector=AUTO, nodes=nodes[1:])
        asked = msgspec.structs.replace(settings([p.url], [d.url]).pool, name="asked")
        found = await settled(Settings(pools=(named, asked, plain)))
        assert [pool.connector for pool in found.pools] == ["mooncake", "nixl", "nixl"]
    down = msgspec.structs.replace(
        settings(["http://127.0.0.1:2"], ["http://127.0.0.1:3"]).pool, name="down"
    )
    with pytest.raises(SettingsError, match=r"^pool down: pools\[1\]\.connector: auto: "):
        await settled(Settings(pools=(plain, down)), deadline=0.2)
