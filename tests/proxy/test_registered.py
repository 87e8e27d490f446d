"""Engines that register, through the whole proxy: P2P NCCL, and MoRIIO in both modes, on simulated
engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq

from pdproxy.fleet.engine import Engine
from pdproxy.observe.events import LegFailed, RequestEnded
from pdproxy.serving.kv import late_close
from pdproxy.settings.engines import Facts as EngineFacts
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.passed import MESSAGES
from tests.fakes.world import CHAT, COMPLETIONS, until
from tests.proxy.registered import Fleet, fleet

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "p2p-nccl": ("p2p-nccl", {}),
    "read": ("moriio", {"transfer_mode": "READ"}),
    "write": ("moriio", {"transfer_mode": "WRITE"}),
}
ALL = pytest.mark.parametrize("kind", list(KINDS))
FOREVER = {"timeout": 1e6}
"""For tests that move the clock: engines' heartbeats come in real time."""


def completion(**more: Any) -> dict[str, Any]:
    """A completion that is split."""
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


def chat(**more: Any) -> dict[str, Any]:
    """A chat that is split."""
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, **more}


SEVERAL = completion(n=2, temperature=1, seed=1)
"""A request that can't be split."""


def run(kind: str, *sizes: int, everybody: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A fleet of one kind."""
    connector, own = KINDS[kind]
    return fleet(connector, *sizes, everybody={**own, **(everybody or {})}, **more)


def _is_free(sim: SimServer) -> bool:
    core = sim.engine._core
    return core is not None and core.pool.usage == 0


async def quiet(f: Fleet) -> None:
    """Wait until nobody holds anything for a request that is over."""
    await until(lambda: not f.left_behind() and not f.proxy.custodian.snapshot()["releasing"][0])
    for sim in f.engines:
        await until(partial(_is_free, sim))


@ALL
@pytest.mark.parametrize("stream", [False, True])
async def test_a_split_prompt_is_answered_as_by_one_engine(kind: str, stream: bool) -> None:
    async with run(kind) as f:
        for path, body in ((COMPLETIONS, completion(stream=stream)), (CHAT, chat(stream=stream))):
            answer, plain = await f.ask(path, body), await f.asked_plain(path, body)
            assert answer.status == 200
            assert answer.text == plain.text
        moved = f.d[0].engine.stats.prompt_tokens_by_source
        assert moved["external_kv_transfer"] > 300
        assert moved["local_compute"] <= 2
        assert f.proxy.readiness().state.value == "ok"
        await quiet(f)


@ALL
async def test_the_client_sees_its_own_id(kind: str) -> None:
    async with run(kind) as f:
        for stream in (False, True):
            answer = await f.world.ask(
                COMPLETIONS, completion(stream=stream), [("x-request-id", "mine")]
            )
            assert answer.status == 200
            assert b"___prefill_addr_" not in answer.body
            assert b'"id":"cmpl-mine"' in answer.body.replace(b'": "', b'":"')


@ALL
@pytest.mark.parametrize("prompt", ["x", "ab", PROMPT[:20]])
async def test_short_prompts_are_split_too(kind: str, prompt: str) -> None:
    async with run(kind) as f:
        answer, plain = (
            await f.ask(COMPLETIONS, completion(prompt=prompt)),
            await f.asked_plain(COMPLETIONS, completion(prompt=prompt)),
        )
        assert (answer.status, answer.text) == (200, plain.text)
        assert len(f.p[0].requests) == len(f.d[0].requests) == 1
        await quiet(f)


async def test_p2p_nccl_s_engines_never_serve_alone() -> None:
    """Not what can't be split, and not what only passes: the aggregated engine gets it, and without
    one nobody does.
    """
    async with run("p2p-nccl", alone=True) as f:
        for body in (SEVERAL, completion(echo=True, logprobs=1)):
            answer = await f.ask(COMPLETIONS, body)
            assert answer.status == 200, answer.body
        response = {"model": "tiny", "input": PROMPT, "max_output_tokens": 5}
        assert (await f.ask("/v1/responses", response)).status == 200
        assert not any(sim.engine.dead for sim in f.engines)
        assert len(f.p[0].requests) == len(f.d[0].requests) == 0
    async with run("p2p-nccl") as f:
        answer = await f.ask(COMPLETIONS, SEVERAL)
        assert answer.status == 503
        assert "no engine can serve this request" in answer.json["error"]["message"]
        assert (await f.ask(COMPLETIONS, completion())).status == 200


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_moriio_s_prefill_engines_serve_alone(kind: str) -> None:
    """A decode engine that reads would answer from whatever its memory holds."""
    async with run(kind) as f:
        answer, plain = await f.ask(COMPLETIONS, SEVERAL), await f.asked_plain(COMPLETIONS, SEVERAL)
        assert answer.json["choices"][0]["text"] == plain.json["choices"][0]["text"]
        assert (len(f.p[0].requests), len(f.d[0].requests)) == (1, 0)


async def test_without_any_registration_a_proxy_is_not_ready() -> None:
    """P2P NCCL's engines serve nothing alone, MoRIIO's prefill engines do."""
    async with run("p2p-nccl", everybody={"register": None}, wait=False) as f:
        found = f.proxy.readiness()
        assert found.state.value == "not_ready"
        assert "has not registered" in (found.reason or "")
        assert (await f.ask(COMPLETIONS, completion())).status == 503
        assert not any(sim.engine.dead for sim in f.engines)
    async with run("read", everybody={"register": None}, wait=False) as f:
        assert f.proxy.readiness().state.value == "degraded"
        answer = await f.ask(COMPLETIONS, completion())
        assert (answer.status, answer.text) == (
            200,
            (await f.asked_plain(COMPLETIONS, completion())).text,
        )
        assert len(f.d[0].requests) == 0


async def test_a_mode_that_the_other_engine_does_not_have() -> None:
    async with run("read", d={"transfer_mode": "WRITE"}) as f:
        assert any("different transfer modes (READ / WRITE)" in text for text in f.ready())
        answer = await f.ask(COMPLETIONS, completion())
        assert (answer.status, len(f.d[0].requests)) == (200, 0)


async def test_engines_behind_another_address() -> None:
    """What they register is not where the proxy reaches them: without the setting they are
    named.
    """
    own = {"everybody": {"registered_as": "10.7.7.7:1"}, "d": {"registered_as": "10.7.7.7:2"}}
    given = {
        "prefill": EngineFacts(registered_as="10.7.7.7:1"),
        "decode": EngineFacts(registered_as="10.7.7.7:2"),
    }
    async with run("read", **own, node_facts=given) as f:
        assert (await f.ask(COMPLETIONS, completion())).status == 200
        assert len(f.d[0].requests) == 1
    async with run("read", **own, wait=False) as f:
        await until(lambda: sum("10.7.7.7:" in text for text in f.ready()) == 2)
        assert f.known.count == 0


async def test_heartbeats_of_no_engine_are_named() -> None:
    async with run("read") as f:
        assert f.proxy.registrations is not None
        address = f.proxy.registrations.socket.address
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(address or "")
            stranger.send(
                msgspec.msgpack.encode(
                    {"type": "P", "http_address": "1.2.3.4:5", "zmq_address": "x:1"}
                )
            )
            stranger.send(b"\xc1 nonsense")
            await until(lambda: any("1.2.3.4:5" in text for text in f.ready()))
        assert f.world.metric("pdproxy_registrations_total", result="unknown") == 1
        assert f.world.metric("pdproxy_registrations_total", result="unreadable") == 1
        assert (await f.ask(COMPLETIONS, completion())).status == 200


async def test_a_port_that_is_taken_stops_the_start() -> None:
    async with run("read") as f:
        other = type(f.proxy).build(f.proxy.settings)
        port = f.proxy.settings.registration.port
        with pytest.raises(
            SettingsError,
            match=rf"can't bind registration.host:registration.port = 127.0.0.1:{port}: Add",
        ):
            other.start()
        await other.stop()


# -- engines that fall silent, and come back


def _names(engine: Engine, port: int) -> bool:
    """Whether the peers of an engine's run are reached at a port."""
    return str(port) in str(engine.run.peers.get(0).address)


@ALL
async def test_silence_and_return_under_traffic(kind: str) -> None:
    """An engine whose heartbeats stop gets no more split prompts, and gets them again; nothing
    fails meanwhile.
    """
    async with run(kind, 1, 2, registration={"timeout": 0.3}) as f:
        done = False
        statuses: list[int] = []

        async def traffic() -> None:
            while not done:
                answer = await f.ask(COMPLETIONS, completion())
                statuses.append(answer.status)

        tasks = [asyncio.create_task(traffic()) for _ in range(3)]
        silent = f.d[0]
        silent.engine.link.silent = True
        await f.registered(2)
        # Legs that were leased before, of any worker: each sees the others' a moment later.
        await until(
            lambda: not any(one.engines[silent.url].in_ledger.requests for one in f.world.workers)
        )
        before = len(silent.requests)
        await asyncio.sleep(0.2)
        assert len(silent.requests) == before
        assert any(silent.url in text and "has not registered" in text for text in f.ready())
        silent.engine.link.silent = False
        await f.registered(3)
        await until(lambda: len(silent.requests) > before)
        done = True
        await asyncio.gather(*tasks)
        assert set(statuses) == {200}
        await quiet(f)


@ALL
async def test_a_restart_with_another_address(kind: str) -> None:
    """The next process has other ports. Until it has registered, nothing is sent to the old
    ones.
    """
    async with run(kind, registration={"timeout": 0.4}, alone=True) as f:
        assert (await f.ask(COMPLETIONS, completion())).status == 200
        for sim in (f.p[0], f.d[0]):
            old = sim.engine.link.port
            sim.engine.link.port = 0
            await sim.restart()
            assert sim.engine.link.port != old
            engine = f.proxy.engines[sim.url]
            f.proxy.prober.soon(engine)
            await until(partial(_names, engine, sim.engine.link.port))
            await f.registered()
        # What an engine met before is gone: the peers of a restarted engine start again, too.
        answer = await f.ask(COMPLETIONS, completion())
        assert (answer.status, answer.text) == (
            200,
            (await f.asked_plain(COMPLETIONS, completion())).text,
        )
        assert f.d[0].engine.stats.prompt_tokens_by_source["external_kv_transfer"] > 150


# -- what is left behind


@ALL
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
async def test_a_client_that_leaves_while_p_works(kind: str, path: str) -> None:
    """KV that no decode engine will read is released, or is written and read in vain. P is asked
    first for a message, and drops that itself.
    """
    async with run(kind, everybody={"defer_timeout": 0.5} if path == MESSAGES else None) as f:
        f.p[0].faults.add(PlannedFault(kind="slow", at="head", args={"delay": 0.2}))
        client = await f.world.client()
        client.send(request("POST", path, completion() if path == COMPLETIONS else chat()))
        await until(lambda: len(f.p[0].requests) == 1)
        client.close()
        await quiet(f)
        assert not any(sim.engine.dead for sim in f.engines)
        assert (await f.ask(COMPLETIONS, completion())).status == 200
        await quiet(f)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_a_client_that_leaves_while_d_waits_for_a_writer(
    monkeypatch: pytest.MonkeyPatch, stream: bool, dispatch: str
) -> None:
    """D never frees what a closed request waits with. So its leg is closed once P must have
    written.
    """
    monkeypatch.setattr(late_close, "KV_GRACE", 5.0)  # for busy machines
    async with run("write", dispatch=dispatch) as f:
        if dispatch == "concurrent":
            await f.p[0].freeze()
        else:
            f.p[0].engine.link.freeze()
        client = await f.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=stream, max_tokens=200)))
        await until(lambda: f.d[0].engine._core.connector._loading)
        client.close()
        await until(lambda: f.world.events(RequestEnded))
        assert f.d[0].engine._core.connector._loading
        if dispatch == "concurrent":
            await f.p[0].thaw()
        else:
            f.p[0].engine.link.thaw()
        await quiet(f)
        assert f.d[0].engine._core.pool.usage == 0
        assert f.proxy.custodian.stuck.snapshot(f.proxy.custodian.now()) == {}


@ALL
async def test_a_client_that_leaves_a_stream(kind: str) -> None:
    async with run(kind, everybody={}) as f:
        f.d[0].faults.add(PlannedFault(kind="slow", at="mid_stream", args={"delay": 0.1}))
        client = await f.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=True, max_tokens=200)))
        await client.head()
        client.close()
        await quiet(f)
        assert (await f.ask(COMPLETIONS, completion())).status == 200


@ALL
async def test_a_request_that_only_d_refuses(kind: str) -> None:
    """D refuses what P, with its one token, took: the KV is released; where P writes, P drops it
    after its own time.
    """
    async with run(kind, everybody={"defer_timeout": 0.5}) as f:
        answer = await f.ask(COMPLETIONS, completion(max_tokens=100_000))
        assert answer.status == 400
        await quiet(f)
        assert not any(sim.engine.dead for sim in f.engines)
        assert (await f.ask(COMPLETIONS, completion())).status == 200


@ALL
async def test_a_p_that_fails_is_replaced(kind: str) -> None:
    async with run(kind, 2, 1) as f:
        f.p[0].faults.add(PlannedFault(kind="status", at="queued"))
        for _ in range(3):
            answer = await f.ask(COMPLETIONS, completion())
            assert answer.status == 200
        await quiet(f)


@ALL
async def test_a_d_that_dies_is_replaced(kind: str) -> None:
    async with run(kind, 1, 2) as f:
        dying = f.d[0]
        dying.faults.add(PlannedFault(kind="reset", at="queued"))
        for _ in range(3):
            answer = await f.ask(COMPLETIONS, completion())
            assert answer.status == 200
        assert dying.faults.happened


# -- deadlines


async def test_p2p_nccl_s_ids_that_differ_end_at_a_deadline() -> None:
    """Without VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, a decode engine waits for ever: the client
    gets an error.
    """
    clock = ManualClock()
    async with run(
        "p2p-nccl", everybody={"randomize_request_ids": True}, clock=clock, registration=FOREVER
    ) as f:
        answer = await clock.through(f.ask(COMPLETIONS, completion(stream=True)))
        assert answer.status == 200, "a comment has sent it meanwhile"
        assert b'"code":503' in answer.events[-1]
        assert any("sent no data in" in event.error for event in f.world.events(LegFailed))


async def test_a_writer_that_is_gone_ends_at_a_deadline() -> None:
    """P has answered and is gone before it has written: D keeps waiting, and the client gets an
    error.
    """
    clock = ManualClock()
    async with run("write", clock=clock, registration=FOREVER) as f:
        f.d[0].engine.link.freeze()
        asked = asyncio.create_task(f.ask(COMPLETIONS, completion(stream=True)))
        await until(lambda: len(f.d[0].requests) == 1)
        await f.p[0].kill()
        answer = await clock.through(asked)
        # A comment may have begun the stream before: then the error is its last event.
        assert answer.status in (502, 503, 504) or b'"error"' in answer.body
        f.d[0].engine.link.thaw()


# -- both legs at once, and one after the other


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_both_orders_of_a_writer(dispatch: str) -> None:
    async with run("write", dispatch=dispatch) as f:
        f.p[0].faults.add(PlannedFault(kind="slow", at="head", args={"delay": 0.3}))
        asked = asyncio.create_task(f.ask(COMPLETIONS, completion()))
        await until(lambda: len(f.p[0].requests) == 1)
        if dispatch == "concurrent":
            await until(lambda: len(f.d[0].requests) == 1)
        answer = await asked
        assert (answer.status, answer.text) == (
            200,
            (await f.asked_plain(COMPLETIONS, completion())).text,
        )
        await quiet(f)


async def test_a_decode_engine_that_waits_for_a_writer_that_failed() -> None:
    """P fails twice: the client is served by another engine, and the request is counted as one that
    D may still wait with.
    """
    async with run("write", alone=True) as f:
        f.p[0].faults.add(PlannedFault(kind="status", at="prefilling", next=2))
        answer = await f.ask(COMPLETIONS, completion(stream=True))
        assert (answer.status, answer.text) == (
            200,
            (await f.asked_plain(COMPLETIONS, completion())).text,
        )
        assert f.proxy.custodian.stuck.snapshot(f.proxy.custodian.now())[f.d[0].url][0] == 1
