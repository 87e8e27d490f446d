"""The server of a simulated engine: its life as a process, its scripts, its journal."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.journal import Journal, Request
from pdproxy_lab.sim.server import SimServer
from tests.fakes.bodies import whole_bodies
from tests.sim.moments import FAST
from tests.sim.raw import (
    CHAT,
    COMPLETIONS,
    PATIENCE,
    Raw,
    ask,
    chat,
    completion,
    get,
    post,
    turns,
    until,
)

SLOW = SimFacts(hardware=Hardware(decode_step_s=30), eos_every=0)
"""Never gets to its second token within a test."""


# -- start and stop


async def test_four_engines_in_one_event_loop():
    async with AsyncExitStack() as stack:
        sims = [
            await stack.enter_async_context(SimServer(FAST, chance=number)) for number in range(4)
        ]
        assert len({sim.port for sim in sims}) == 4
        answers = await asyncio.gather(*(ask(sim.port, completion()) for sim in sims))
    assert [one.answer.status for one in answers] == [200] * 4
    for sim in sims:
        with pytest.raises(ConnectionRefusedError):
            await Raw.connect(sim.port)


async def test_the_answer_has_the_headers_of_uvicorn(sim):
    answer = (await ask(sim.port, completion())).answer
    assert list(answer.headers)[:2] == ["date", "server"]
    assert answer.headers["server"] == "uvicorn"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_whose_ids_were_handed_over_has_no_text_of_its_prompt(sim, stream):
    async def said(**body):
        answer = (await ask(sim.port, chat(stream, **body))).answer
        text = answer.body.decode()
        first, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
        return first["prompt_text"]

    assert "one two" in await said(return_prompt_text=True)
    assert await said() is None
    assert (
        await said(return_prompt_text=True, kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
        is None
    )


async def test_a_port_that_is_taken_is_an_error_and_leaves_nothing():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for more in ({"port": port}, {"admin_port": port}):
            sim = SimServer(FAST, **more)
            with pytest.raises(OSError, match="in use"):
                await sim.start()
            assert not sim.listening


async def test_stop_ends_whatever_is_under_way():
    sim = SimServer(SLOW)
    await sim.start()
    sim.faults.add("stall@queued")
    clients = [await Raw.connect(sim.port) for _ in range(3)]
    for client, stream in zip(clients, (False, False, True), strict=True):
        client.send(completion(stream))
    await sim.journal.received(3)
    await asyncio.wait_for(sim.stop(), PATIENCE)
    for client in clients:
        await client.end()
    await sim.stop()


async def test_a_connection_serves_many_requests_also_in_a_row(sim):
    client = await Raw.connect(sim.port)
    client.send(get("/health") + completion() + get("/version"))
    await client.until(lambda: b'{"version"' in client.data)
    assert client.data.count(b"HTTP/1.1 200") == 3
    assert sim.connections == 1


async def test_pipelined_requests_behind_a_split_answer_keep_their_order(sim):
    sim.faults.add("split@queued:cuts=8")
    client = await Raw.connect(sim.port)
    client.send(completion() + get("/version"))
    await client.until(lambda: b'{"version"' in client.data)
    first, mark, second = client.data.partition(b"}HTTP/1.1 200")
    assert mark
    assert first.count(b"HTTP/1.1 200") == 1
    assert second.endswith(b'{"version":"0.32.0"}')


# -- the life of a process


async def test_a_killed_engine_drops_all_and_refuses(sim):
    idle = await ask(sim.port, get("/health"))
    sim.faults.add("stall@mid_stream")
    busy = await Raw.connect(sim.port)
    busy.send(completion(stream=True))
    await until(lambda: sim.faults.happened)
    await sim.kill()
    for client in (idle, busy):
        await client.end()
    assert sim.requests[-1].over
    assert not sim.requests[-1].left.is_set()
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(sim.port)


async def test_a_killed_engine_resets_connections_that_it_never_took(sim):
    await sim.freeze()
    client = await Raw.connect(sim.port)
    client.send(completion())
    await sim.kill()
    assert (await client.end()).ended == "reset"
    assert not client.data


async def test_a_restarted_engine_has_its_port_and_nothing_else(sim):
    port, before = sim.port, sim.engine.engine_id
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    await ask(sim.port, completion(max_tokens=1, kv_transfer_params=params))
    assert sim.engine.handles
    await sim.restart()
    assert (sim.port, sim.engine.handles) == (port, {})
    assert sim.engine.engine_id != before
    assert (await ask(port, completion())).answer.status == 200


async def test_nobody_gets_the_port_while_an_engine_is_down(sim):
    await sim.kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", sim.port))
    await sim.restart()
    assert sim.listening


async def test_the_port_refuses_while_a_restart_takes_its_time(sim):
    restarting = asyncio.create_task(sim.restart(down=0.05))
    await until(lambda: not sim.listening)
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(sim.port)
    await restarting
    assert (await ask(sim.port, get("/health"))).answer.status == 200


@pytest.mark.parametrize(
    ("facts", "ports"),
    [
        pytest.param({}, lambda sim: sim.engine.side_channel_ports, id="nixl"),
        pytest.param(
            {"connector": "p2p-nccl", "role": "prefill"},
            lambda sim: [sim.engine.link.port],
            id="p2p-nccl",
        ),
        pytest.param(
            {"connector": "lmcache-pd", "role": "decode"},
            lambda sim: [port for ports in sim.engine.receiver_ports for port in ports],
            id="lmcache-pd",
        ),
    ],
)
async def test_a_killed_engine_keeps_its_ports_until_its_end(facts, ports):
    async with SimServer(SimFacts(**facts)) as sim:
        kept = ports(sim)
        assert all(kept)
        await sim.kill()
        for port in kept:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                # without SO_REUSEADDR, like the port of a connection
                other.bind(("127.0.0.1", port))
            with pytest.raises(ConnectionRefusedError):
                await Raw.connect(port)
        await sim.restart()
        assert ports(sim) == kept
        assert kept != []


async def test_a_frozen_engine_keeps_sockets_and_takes_connections_without_a_word(sim):
    old = await ask(sim.port, get("/health"))
    old.pieces.clear()
    await sim.freeze()
    new = await Raw.connect(sim.port)
    for client in (old, new):
        client.send(completion())
    await turns()
    assert not sim.requests
    assert not any(client.data or client.ended for client in (old, new))
    await sim.thaw()
    for client in (old, new):
        assert (await client.whole()).answer.status == 200


async def test_who_leaves_a_frozen_engine_is_noticed_when_it_goes_on():
    async with SimServer(SLOW) as sim:
        client = await Raw.connect(sim.port)
        client.send(completion())
        request = await sim.journal.received()
        await sim.freeze()
        client.leave()
        await turns()
        assert not request.left.is_set()
        await sim.thaw()
        await asyncio.wait_for(request.left.wait(), PATIENCE)


async def test_a_frozen_engine_can_be_killed_and_started_again(sim):
    await sim.freeze()
    client = await Raw.connect(sim.port)
    await sim.restart()
    await client.end()
    assert (await ask(sim.port, completion())).answer.status == 200


async def test_a_terminated_engine_closes_what_is_idle_and_falls_silent_elsewhere(sim):
    idle = await ask(sim.port, get("/health"))
    sim.faults.add("slow@mid_stream:delay=600")
    busy = await Raw.connect(sim.port)
    busy.send(completion(stream=True))
    await until(lambda: sim.faults.happened)
    await sim.terminate()
    await idle.end()
    await turns()
    assert not busy.ended
    assert not busy.answer.complete
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(sim.port)
    await sim.restart()
    await busy.end()


async def test_orders_that_make_no_sense_do_nothing(sim):
    await sim.thaw()
    await sim.kill()
    await sim.freeze()
    await sim.terminate()
    await sim.thaw()
    assert sim.life == "down"


# -- scripts


async def test_scripts_answer_one_request_each_then_the_engine(sim):
    async def whole(reply):
        await reply.whole(b'{"a": 1}', 201, [("x-more", "yes")])

    async def stream(reply):
        await reply.start()
        await reply.pieces(b"data: 1\n\n", b"data: 2\n\n")
        await reply.finish()

    sim.faults.script(whole, stream)
    client = await ask(sim.port, completion())
    assert (client.answer.status, client.answer.json, client.answer.headers["x-more"]) == (
        201,
        {"a": 1},
        "yes",
    )
    client.pieces.clear()
    client.send(completion())
    assert (await client.whole()).answer.chunks == [b"data: 1\n\n", b"data: 2\n\n"]
    client.pieces.clear()
    client.send(completion())
    assert (await client.whole()).answer.json["object"] == "text_completion"
    assert [request.connection for request in sim.requests] == [1, 1, 1], "the connection was kept"
    assert all(request.over for request in sim.requests)


@pytest.mark.parametrize(("how", "ended"), [("eof", "eof"), ("reset", "reset")])
async def test_a_script_ends_the_connection(sim, how, ended):
    async def script(reply):
        await reply.raw(b"HTTP/1.1 200 OK\r\n")
        getattr(reply, how)()

    sim.faults.script(script)
    seen = await (await ask(sim.port, completion())).end()
    assert (seen.data, seen.ended) == (b"HTTP/1.1 200 OK\r\n", ended)
    assert sim.requests[-1].over


async def test_a_script_that_stalls_ends_when_the_client_leaves(sim):
    ended = asyncio.Event()

    async def script(reply):
        try:
            await reply.stall()
        finally:
            ended.set()

    sim.faults.script(script)
    client = await Raw.connect(sim.port)
    client.send(completion())
    request = await sim.journal.received()
    client.leave()
    await asyncio.wait_for(ended.wait(), PATIENCE)
    assert request.left_at is not None
    assert not request.over


async def test_a_script_reads_the_request_and_lets_the_engine_answer(sim):
    seen = []

    async def script(reply):
        seen.append((reply.request.json["prompt"], reply.request.chat, reply.request.ident))
        await reply.serve()

    sim.faults.script(script)
    answer = (
        await ask(sim.port, post(COMPLETIONS, "x-request-id: a7\r\n", prompt="one", max_tokens=1))
    ).answer
    assert seen == [("one", False, "a7")]
    assert answer.json["id"] == "cmpl-a7"


async def test_scripts_for_routes_releases_and_all_others(sim):
    def says(body):
        async def script(reply):
            await reply.whole(body)

        return script

    sim.scripts.routes["/health"] = says(b"1")
    sim.scripts.on_release = says(b"2")
    sim.scripts.default = says(b"3")
    sim.faults.script(says(b"4"))
    requests = (get("/health"), completion(max_tokens=0), completion(), chat())
    assert [(await ask(sim.port, one)).answer.body for one in requests] == [b"1", b"2", b"4", b"3"]


@pytest.mark.filterwarnings("default")
async def test_a_script_that_fails_is_a_crash_that_tests_can_see():
    async def script(reply):
        raise KeyError("oops")

    async with SimServer(FAST) as sim:
        sim.faults.script(script)
        assert (await ask(sim.port, completion())).ended
        assert sim.crashes == ["/v1/completions: KeyError('oops')"]


# -- the journal


async def test_the_journal_tells_what_came_and_who_left():
    async with SimServer(SLOW) as sim:
        await ask(sim.port, get("/health"))
        client = await Raw.connect(sim.port)
        client.send(chat(max_tokens=9))
        request = await sim.journal.received()
        assert (request.method, request.path, request.json["max_tokens"], request.connection) == (
            "POST",
            CHAT,
            9,
            2,
        )
        assert request.header("Content-Type") == "application/json"
        assert not request.over
        assert not request.left.is_set()
        client.leave()
        await asyncio.wait_for(request.left.wait(), PATIENCE)
        assert request.left_at is not None
        assert request.left_at >= request.arrived
        assert not request.over
        assert [one.path for one in sim.journal.others] == ["/health"]


async def test_handles_given_back_are_no_requests(sim):
    assert (await ask(sim.port, completion(max_tokens=0))).answer.status == 400
    assert not sim.requests
    assert (await sim.journal.released()).json["max_tokens"] == 0


async def test_the_journal_forgets_what_is_old():
    journal = Journal(limit=2)
    for number in range(3):
        journal.note(Request("POST", COMPLETIONS, [], json.dumps({"n": number}).encode(), 1))
    assert [request.json["n"] for request in journal.requests] == [1, 2]
    assert (await journal.received(3)).json["n"] == 2
    with pytest.raises(TimeoutError):
        await journal.received(4, timeout=0.01)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_reads_as_an_empty_one(body):
    request = Request("POST", COMPLETIONS, [], body, 1)
    assert (request.json, request.kv, request.stream, request.release) == ({}, None, False, False)


_BROKEN = [
    (b'{"prompt": "a", "kv_transfer_params":}', "no JSON"),
    (b"{", "no JSON"),
    (b"\xff", "no JSON"),
    (b'{"prompt": "a", "max_tokens": 0, "kv_transfer_params": {}}', "empty kv_transfer_params"),
]
_WHOLE = [
    b"",
    b"{}",
    b"[1]",
    b'{"prompt": "a", "kv_transfer_params": null}',
    '{"prompt": "ä"}'.encode("utf-16"),
]


def raw_post(body: bytes) -> bytes:
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.broken_bodies("sent to see that they are noted")
@pytest.mark.parametrize(("body", "what"), _BROKEN)
async def test_a_body_that_is_broken_is_noted_with_its_end_and_fails_a_test(sim, body, what):
    with pytest.raises(pytest.fail.Exception) as failed, whole_bodies():
        await ask(sim.port, raw_post(b" " * 200 + body))
    (defect,) = sim.defective
    assert defect.startswith(f"POST {COMPLETIONS}: {what}")
    assert defect.endswith(f": ...{(b' ' * 200 + body)[-120:]!r}")
    assert f"aggregated engine {sim.url}: {defect}" in str(failed.value)


@pytest.mark.parametrize("body", _WHOLE)
async def test_other_bodies_are_not_noted(sim, body):
    await ask(sim.port, raw_post(body))
    assert not sim.defective


# -- the API server alone


@pytest.mark.parametrize("down", [0.0, 0.05])
async def test_an_api_server_that_starts_again_has_the_same_core(sim, down):
    name = sim.engine.engine_id
    await ask(sim.port, completion(prompt=list(range(300, 400))))
    kept = await Raw.connect(sim.port)
    restart = asyncio.ensure_future(sim.restart_api(down))
    await until(lambda: kept.ended)
    if down:
        with pytest.raises(ConnectionRefusedError):
            await Raw.connect(sim.port)
    await restart
    again = await ask(sim.port, completion(prompt=list(range(300, 400))))
    assert again.answer.status == 200
    assert sim.engine.engine_id == name
    assert sim.engine.stats.prefix_cache_hits == 96
