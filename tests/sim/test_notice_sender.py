"""Engines that tell the proxy of KV, over real sockets: who gets which notices, and what faults
make of them.
"""

import asyncio
import json
from contextlib import AsyncExitStack

import msgspec
import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import LMCacheFacts, SimFacts
from pdproxy_lab.sim.faults.book import parse
from pdproxy_lab.sim.faults.kind import FaultError
from pdproxy_lab.sim.faults.notices import NO_NOTICES
from pdproxy_lab.sim.pd_link import spec
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.sim.storage import MemoryStorage
from tests.sim.engines import PREFILL, plain
from tests.sim.raw import Raw, ask, until

zmq = pytest.importorskip("zmq")

FAST = Hardware(speed=0)
PROMPT = list(range(300, 400))
MODES = ["async", "sync"]
DEAD_END = spec("127.0.0.1", [9], [9], "r-1")


class Proxy:
    """A PULL socket, and what came in."""

    def __init__(self):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.raw = []

    def collect(self):
        while self._socket.poll(0):
            self.raw.append(self._socket.recv())
        return self.raw

    async def got(self, count):
        """Wait for so many messages; return all, decoded."""
        await until(lambda: len(self.collect()) >= count)
        await asyncio.sleep(0.02)
        return [msgspec.msgpack.decode(one) for one in self.collect()]

    def close(self):
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def stack():
    async with AsyncExitStack() as made:
        yield made


@pytest.fixture
def proxy(stack):
    made = Proxy()
    yield made
    made.close()


@pytest.fixture
def start(stack):
    async def started(role, faults=(), storage=None, **facts):
        usual = {"hardware": FAST, "eos_every": 0, "enable_prefix_caching": False, **facts}
        sim = SimServer(SimFacts(role=role, **usual), faults=faults, storage=storage)
        await stack.enter_async_context(sim)
        stack.callback(lambda: check(sim))
        return sim

    def check(sim):
        assert not sim.crashes

    return started


def lmcache(role, mode="async", **more):
    config = {
        "chunk_size": 32,
        "pd_backend_mode": mode,
        "pd_peer_init_port": 0,
        "pd_peer_alloc_port": 0,
    }
    return LMCacheFacts(**config, skip_last_n_tokens=int(role == "decode"), **more)


@pytest.fixture
def pair(start, proxy):
    async def made(mode="async", faults=(), **facts):
        both = {"connector": "lmcache-pd", **facts}
        p = await start(
            "prefill", faults, notify=proxy.address, lmcache=lmcache("prefill", mode), **both
        )
        d = await start("decode", lmcache=lmcache("decode", mode), **both)
        return p, d

    return made


async def post(sim, body, path="/v1/completions", ident=None, status=200):
    data = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"x-request-id: {ident}\r\n" if ident else ""
    client = await ask(sim.port, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    client.leave()
    assert client.answer.status == status
    return json.loads(client.answer.body)


def owed(d, req_id="r-1"):
    init, alloc = d.engine.receiver_ports
    return {"ret_first_tok": True, "disagg_spec": spec("127.0.0.1", init, alloc, req_id)}


async def prefill(p, d, req_id="r-1", **more):
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": owed(d, req_id), **more}
    return (await post(p, body))["kv_transfer_params"]["first_tok"]


async def decode(d, first):
    body = {"prompt": [*PROMPT, first], "max_tokens": 7, "return_token_ids": True}
    return [first, *(await post(d, body))["choices"][0]["token_ids"]]


def external(sim):
    return sim.engine.stats.prompt_tokens_by_source["external_kv_transfer"]


# -- LMCache PD


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
async def test_chunks_move_and_each_rank_tells(pair, proxy, mode, ranks):
    p, d = await pair(mode, tensor_parallel_size=ranks)
    first = await prefill(p, d)
    assert await proxy.got(ranks) == [{"type": "ProxyNotif", "req_id": "r-1"}] * ranks
    assert await decode(d, first) == plain()
    assert external(d) == 100
    assert p.engine.notice_sender.counts == {"sent": ranks}


async def test_a_lost_notice(pair, proxy):
    p, d = await pair(faults=["lost_notice"])
    first = await prefill(p, d)
    await prefill(p, d, "r-2")
    assert [one["req_id"] for one in await proxy.got(1)] == ["r-2"]
    assert await decode(d, first) == plain()
    assert external(d) == 100


async def test_a_silent_rank(pair, proxy):
    p, d = await pair(faults=["lost_notice:rank=1,rate=1"], tensor_parallel_size=3)
    for number in range(3):
        await prefill(p, d, f"r-{number}")
    assert len(await proxy.got(6)) == 6
    assert p.faults.happened == {"lost_notice@notice": 3}


async def test_a_double_notice(pair, proxy):
    p, d = await pair(faults=["double_notice"])
    await prefill(p, d)
    assert await proxy.got(2) == [{"type": "ProxyNotif", "req_id": "r-1"}] * 2


async def test_a_late_notice(pair, proxy):
    p, d = await pair(faults=["late_notice:delay=0.2"])
    await prefill(p, d)
    await prefill(p, d, "r-2")
    assert [one["req_id"] for one in await proxy.got(2)] == ["r-2", "r-1"]


@pytest.mark.parametrize("instead", [True, False])
async def test_garbage(pair, proxy, instead):
    p, d = await pair(faults=[f"garbage_notice:instead={str(instead).lower()}"])
    await prefill(p, d)
    count = len(NO_NOTICES) + (not instead)
    await until(lambda: len(proxy.collect()) >= count)
    assert proxy.collect()[: len(NO_NOTICES)] == list(NO_NOTICES)
    assert len(proxy.collect()) == count


async def test_without_lmcache_the_engine_is_healthy_and_tells_nobody(start, proxy):
    both = {"connector": "lmcache-pd"}
    p = await start(
        "prefill", notify=proxy.address, lmcache=lmcache("prefill", degraded=True), **both
    )
    d = await start("decode", lmcache=lmcache("decode", degraded=True), **both)
    assert await decode(d, await prefill(p, d)) == plain()
    assert external(d) == 0
    assert p.engine.notice_sender.counts == {}
    assert not p.engine.dead


async def test_notices_wait_for_a_proxy_that_comes_later(start):
    context = zmq.Context()
    held = context.socket(zmq.PULL)
    port = held.bind_to_random_port("tcp://127.0.0.1")
    held.close(linger=0)
    try:
        both = {"connector": "lmcache-pd"}
        p = await start(
            "prefill", notify=f"tcp://127.0.0.1:{port}", lmcache=lmcache("prefill"), **both
        )
        d = await start("decode", lmcache=lmcache("decode"), **both)
        await prefill(p, d)
        await until(lambda: p.engine.notice_sender.counts["sent"] == 1)
        later = context.socket(zmq.PULL)
        later.bind(f"tcp://127.0.0.1:{port}")
        await until(lambda: later.poll(0))
        assert msgspec.msgpack.decode(later.recv())["req_id"] == "r-1"
        later.close(linger=0)
    finally:
        context.term()


@pytest.mark.parametrize("mode", MODES)
async def test_a_decode_engine_that_was_restarted_gets_nothing_more(pair, proxy, mode):
    p, d = await pair(mode)
    await prefill(p, d)
    await proxy.got(1)
    await d.restart()
    first = await prefill(p, d, "r-2")
    buffer = d.engine._pd().buffers[0]
    if mode == "sync":  # the name is there, the KV is not
        await until(lambda: len(buffer.held) == 4)
        assert await decode(d, first) != plain()
    else:
        sender = p.engine._pd()
        await until(lambda: not (sender._offers or sender._progress or buffer.held))
        assert await decode(d, first) == plain()
    assert len(await proxy.got(1)) == 1


async def test_a_prefill_engine_that_was_restarted_tells_again(pair, proxy):
    p, d = await pair()
    await prefill(p, d)
    await proxy.got(1)
    await p.restart()
    first = await prefill(p, d, "r-2")
    assert [one["req_id"] for one in await proxy.got(2)] == ["r-1", "r-2"]
    assert await decode(d, first) == plain()


async def test_prefill_stops_until_its_decode_engine_is_there(pair, proxy):
    p, d = await pair()
    ports = owed(d)
    await d.kill()
    waiting = asyncio.ensure_future(
        post(p, {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": ports})
    )
    await until(lambda: p.engine._pd().blocked)
    other = asyncio.ensure_future(
        post(p, {"prompt": PROMPT[:50], "max_tokens": 1, "kv_transfer_params": ports})
    )
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not other.done()
    await d.restart()
    assert (await waiting)["kv_transfer_params"]
    assert (await other)["kv_transfer_params"]
    assert len(await proxy.got(2)) == 2


async def test_prefill_dies_of_a_client_that_leaves_before_the_first_token(start, proxy):
    # two seconds a prompt
    both = {"connector": "lmcache-pd", "hardware": Hardware(prefill_tokens_per_s=50)}
    p = await start("prefill", notify=proxy.address, lmcache=lmcache("prefill"), **both)
    body = {
        "prompt": PROMPT,
        "max_tokens": 1,
        "kv_transfer_params": {"ret_first_tok": True, "disagg_spec": DEAD_END},
    }
    data = json.dumps(body).encode()
    client = await Raw.connect(p.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await until(lambda: p.engine.stats.running)
    client.leave()
    await until(lambda: p.engine.dead)


async def test_prefill_dies_of_a_request_without_a_receiver(pair):
    p, _ = await pair()
    answer = await post(p, {"prompt": PROMPT, "max_tokens": 1}, status=500)
    assert "EngineCore" in answer["error"]["message"]
    assert p.engine.dead


# -- LMCache MP


class Telemetry:
    """An HTTP server that keeps what is posted to it."""

    def __init__(self):
        self.bodies = []
        self.heads = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api/v1/telemetry"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.heads.append(head.partition("\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


async def test_lmcache_mp_posts_one_report_a_rank(start):
    async with Telemetry() as telemetry:
        both = {
            "connector": "lmcache-mp",
            "lmcache": LMCacheFacts(chunk_size=32),
            "tensor_parallel_size": 2,
        }
        storage = MemoryStorage()
        p = await start("prefill", storage=storage, notify=telemetry.url, **both)
        d = await start("decode", storage=storage, **both)
        await post(p, {"prompt": PROMPT, "max_tokens": 1}, ident="pd-1")
        await until(lambda: len(telemetry.bodies) == 2)
        assert {one["kv_rank"] for one in telemetry.bodies} == {0, 1}
        (name,) = {name for one in telemetry.bodies for name in one["request_ids_set"]}
        assert name.startswith("cmpl-pd-1-0-")
        assert telemetry.heads == ["post /api/v1/telemetry http/1.1"] * 2
        body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}
        assert (await post(d, body))["choices"][0]["token_ids"] == plain()
        assert external(d) == 96
        assert len(telemetry.bodies) == 2


async def test_reports_that_nobody_takes_are_dropped(start):
    p = await start("prefill", connector="lmcache-mp", notify="http://127.0.0.1:9/x")
    await post(p, {"prompt": PROMPT, "max_tokens": 1})
    await until(lambda: p.engine.notice_sender.counts["dropped"] == 1)


# -- NIXL with the notifier


async def test_the_notifier_tells_of_a_transfer(start, proxy):
    p = await start("prefill", notify=proxy.address)
    d = await start("decode", notify=proxy.address)

    async def transfer(ident):
        body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": PREFILL}
        handle = (await post(p, body, ident=ident))["kv_transfer_params"]
        body = {
            "prompt": PROMPT,
            "max_tokens": 8,
            "return_token_ids": True,
            "kv_transfer_params": handle,
        }
        assert (await post(d, body, ident="client"))["choices"][0]["token_ids"] == plain()

    # What is reported before the connection stands is lost, as it is by the real one.
    async with asyncio.timeout(60):
        while not {"loaded", "released"} <= {one["event"] for one in await proxy.got(0)}:
            await transfer("before")
    await transfer("pd-7")
    sent = sum(one.engine.notice_sender.counts["sent"] for one in (p, d))
    found = [one for one in await proxy.got(sent) if one["req_id"] != "before"]
    assert sorted(one["event"] for one in found) == ["loaded", "ready", "released"]
    assert {one["req_id"] for one in found} == {"pd-7"}
    assert all(one["t"] > 0 and one["wall"] > 1e9 for one in found)


# -- storage in a folder


async def test_engines_share_a_folder(start, tmp_path):
    both = {"connector": "shared", "shared_storage_path": str(tmp_path / "kv")}
    p, d = await start("prefill", **both), await start("decode", **both)
    answer = await post(p, {"prompt": PROMPT, "max_tokens": 1})
    assert answer["kv_transfer_params"] is None
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}
    assert (await post(d, body))["choices"][0]["token_ids"] == plain()
    assert external(d) == 96
    await d.restart()
    assert (await post(d, body))["choices"][0]["token_ids"] == plain()
    assert external(d) == 96


# -- faults, said wrongly


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("lost_notice@queued", "no moment"),
        ("reset@notice", "no moment"),
        ("lost_notice:path=/x", "no path"),
        ("late_notice:delay=-1", "negative"),
        ("late_notice:ranks=1", "takes no"),
    ],
)
def test_faults_that_make_no_sense(said, why):
    with pytest.raises(FaultError, match=why):
        parse(said)
