"""Faults of connections and of engines, as a client sees them at each moment."""

import asyncio

import pytest

from pdproxy_lab.sim.faults.answers import NO_HTTP
from tests.sim.moments import STREAM_MOMENTS, WORDS
from tests.sim.raw import COMPLETIONS, PATIENCE, Raw, ask, completion, get, post, turns, until

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen"
)


async def handle(p):
    answer = (
        await ask(p.port, completion(prompt=LONG, max_tokens=1, kv_transfer_params=PREFILL))
    ).answer
    return answer.json["kv_transfer_params"]


# -- connections that end or fall silent


@pytest.mark.parametrize("kind", ["reset", "eof"])
@pytest.mark.parametrize(("at", "events"), STREAM_MOMENTS.items())
async def test_a_stream_ends_at_its_moment(sim, kind, at, events):
    sim.faults.add(f"{kind}@{at}")
    seen = await ask(sim.port, completion(stream=True))
    await seen.end()
    assert seen.ended == kind
    assert seen.answer.status == 200
    assert len(seen.answer.chunks) == events
    assert not seen.answer.complete
    assert not seen.answer.rest
    assert sim.requests[-1].over
    assert not sim.requests[-1].left.is_set()


@pytest.mark.parametrize("kind", ["reset", "eof"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_gets_no_byte(sim, kind, stream):
    sim.faults.add(f"{kind}@queued")
    seen = await ask(sim.port, completion(stream=stream))
    assert (seen.ended, seen.data) == (kind, b"")
    assert sim.engine.stats.prompt_tokens == 0


@pytest.mark.parametrize("kind", ["reset", "eof"])
@pytest.mark.parametrize(
    ("at", "head"), [("prefilling", False), ("last_chunk", False), ("head", True)]
)
async def test_a_whole_answer_is_cut_at_its_moment(sim, kind, at, head):
    sim.faults.add(f"{kind}@{at}")
    seen = await ask(sim.port, completion())
    assert seen.ended == kind
    assert seen.answer.status == (200 if head else None)
    assert seen.answer.body == b""


@pytest.mark.parametrize("kind", ["reset", "eof"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_ends_after_a_whole_answer(sim, kind, stream):
    sim.faults.add(f"{kind}@after")
    seen = await (await ask(sim.port, completion(stream=stream))).end()
    assert seen.ended == kind
    assert seen.answer.complete


@pytest.mark.parametrize(("at", "events"), STREAM_MOMENTS.items())
async def test_a_stream_stalls_with_an_open_socket(sim, at, events):
    sim.faults.add(f"stall@{at}")
    client = await Raw.connect(sim.port)
    client.send(completion(stream=True))
    await until(lambda: sim.faults.happened)
    assert (await ask(sim.port, get("/health"))).answer.status == 200
    assert not client.ended
    assert len(client.answer.chunks) == events
    assert not client.answer.complete
    client.leave()
    await asyncio.wait_for(sim.requests[-1].left.wait(), PATIENCE)


@pytest.mark.parametrize("at", ["queued", "prefilling", "last_chunk", "head"])
async def test_a_whole_answer_stalls(sim, at):
    sim.faults.add(f"stall@{at}")
    client = await Raw.connect(sim.port)
    client.send(completion())
    await until(lambda: sim.faults.happened)
    assert (await ask(sim.port, get("/health"))).answer.status == 200
    assert not client.ended
    assert client.answer.body == b""
    client.leave()
    await asyncio.wait_for(sim.requests[-1].left.wait(), PATIENCE)


async def test_a_connection_that_stalls_after_an_answer_answers_no_more(sim):
    sim.faults.add("stall@after")
    seen = await ask(sim.port, completion())
    seen.send(completion())
    await ask(sim.port, get("/health"))
    assert not seen.ended
    assert len(sim.requests) == 1


@pytest.mark.parametrize("kind", ["reset", "eof", "garbage", "stall"])
async def test_a_connection_is_hit_when_it_is_accepted(sim, kind):
    sim.faults.add(f"{kind}@accept")
    client = await Raw.connect(sim.port)
    if kind in ("reset", "eof"):
        assert (await client.end()).ended == kind
    else:
        client.send(completion())
        await ask(sim.port, get("/health"))
        assert client.data == (NO_HTTP if kind == "garbage" else b"")
        assert not client.ended
    assert not sim.requests


async def test_a_slow_accept_reads_late(sim):
    sim.faults.add("slow@accept:delay=0.01")
    assert (await ask(sim.port, completion())).answer.status == 200


async def test_a_refusing_engine_has_no_listener_until_the_fault_is_gone(sim):
    idle = await ask(sim.port, get("/health"))
    number = sim.faults.add("refuse")
    await idle.end()
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(sim.port)
    sim.faults.remove(number)
    assert (await ask(sim.port, get("/health"))).answer.status == 200


async def test_a_refusal_can_end_by_itself(sim):
    sim.faults.add("refuse:seconds=0.01")
    assert not sim.listening
    await until(lambda: sim.listening)
    assert (await ask(sim.port, completion())).answer.status == 200


async def test_a_running_answer_outlives_a_refusal(sim):
    go_on = asyncio.Event()
    sim.faults.script(gated(go_on))
    client = await Raw.connect(sim.port)
    client.send(completion())
    await sim.journal.received()
    sim.faults.add("refuse")
    go_on.set()
    assert (await client.whole()).answer.status == 200


def gated(event):
    async def script(reply):
        await event.wait()
        await reply.serve()

    return script


# -- an engine that is ill


@pytest.mark.parametrize("at", ["queued", "prefilling"])
async def test_a_dead_core_fails_the_request_and_all_others(sim, at):
    sim.faults.add(f"dead_core@{at}")
    answer = (await ask(sim.port, completion())).answer
    assert answer.status == 500
    assert "EngineCore" in answer.json["error"]["message"]
    assert (await ask(sim.port, get("/health"))).answer.status == 503
    assert (await ask(sim.port, completion())).answer.status == 500


@pytest.mark.parametrize("at", [*STREAM_MOMENTS])
async def test_a_dead_core_ends_a_stream_with_an_error_event(sim, at):
    sim.faults.add(f"dead_core@{at}")
    answer = (await ask(sim.port, completion(stream=True))).answer
    assert answer.texts[STREAM_MOMENTS[at] :] == ["error", "[DONE]"]
    assert (await ask(sim.port, get("/health"))).answer.status == 503


async def test_a_dead_core_after_an_answer(sim):
    sim.faults.add("dead_core@after")
    assert (await ask(sim.port, completion(stream=True))).answer.texts[-1] == "[DONE]"
    assert (await ask(sim.port, get("/health"))).answer.status == 503


@pytest.mark.parametrize("at", ["queued", "head", "mid_stream", "after"])
async def test_a_restart_drops_the_connection_and_brings_another_engine(sim, at):
    before, port = sim.engine.engine_id, sim.port
    sim.faults.add(f"restart@{at}")
    seen = await (await ask(sim.port, completion(stream=True))).end()
    assert seen.ended == "eof"
    assert len(seen.answer.chunks) == {"mid_stream": 2, "after": WORDS + 1}.get(at, 0)
    await until(lambda: sim.life == "up")
    assert sim.engine.engine_id != before
    assert (await ask(port, completion())).answer.status == 200


@pytest.mark.parametrize("at", ["queued", "mid_stream"])
async def test_a_killed_engine_is_gone(sim, at):
    sim.faults.add(f"kill@{at}")
    seen = await (await ask(sim.port, completion(stream=True))).end()
    assert len(seen.answer.chunks) == STREAM_MOMENTS.get(at, 0)
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(sim.port)


@pytest.mark.parametrize("at", ["queued", "head", "mid_stream", "last_chunk"])
async def test_no_fin_is_silence_on_an_open_socket_without_a_listener(sim, at):
    idle = await ask(sim.port, get("/health"))
    sim.faults.add(f"no_fin@{at}")
    client = await Raw.connect(sim.port)
    client.send(completion(stream=True))
    await until(lambda: sim.life == "terminated")
    await idle.end()
    with pytest.raises(ConnectionRefusedError):
        await Raw.connect(sim.port)
    await turns()
    assert not client.ended
    assert len(client.answer.chunks) == STREAM_MOMENTS.get(at, 0)
    client.leave()
    await asyncio.wait_for(sim.requests[-1].left.wait(), PATIENCE)


async def test_a_frozen_engine_goes_on_where_it_was(sim):
    sim.faults.add("freeze@mid_stream")
    client = await Raw.connect(sim.port)
    client.send(completion(stream=True))
    await until(lambda: sim.frozen)
    await turns()
    assert len(client.answer.chunks) == 2
    await sim.thaw()
    assert (await client.whole()).answer.texts[-1] == "[DONE]"


async def test_a_freeze_can_end_by_itself(sim):
    sim.faults.add("freeze@queued:seconds=0.01")
    assert (await ask(sim.port, completion())).answer.status == 200


# -- handles


@pytest.mark.parametrize("at", ["handed_over", "after"])
async def test_a_lease_ends_at_once(pair, at):
    p, _ = pair
    p.faults.add(f"lease_expiry@{at}")
    await handle(p)
    assert p.faults.happened
    assert not p.engine.handles
    assert p.engine.stats.kv_expired == 1


async def test_handed_over_is_no_moment_of_a_request_without_a_handle(pair):
    p, d = pair
    p.faults.add("reset@handed_over")
    d.faults.add("reset@handed_over")
    for one in pair:
        assert (await ask(one.port, completion())).answer.status == 200
        assert one.faults.armed


@pytest.mark.parametrize(
    ("spec", "status"),
    [("reset", None), ("status:status=503", 503), ("garbage:what=json", 200), ("empty_body", 200)],
)
async def test_the_answer_with_the_handle_is_lost(pair, spec, status):
    p, _ = pair
    kind, _, rest = spec.partition(":")
    p.faults.add(f"{kind}@handed_over:{rest}".rstrip(":"))
    answer = (
        await ask(p.port, completion(prompt=LONG, max_tokens=1, kv_transfer_params=PREFILL))
    ).answer
    assert answer.status == status
    assert len(p.engine.handles) == 1, "the KV waits, and nobody knows its handle"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_load_fails(pair, stream):
    p, d = pair
    d.faults.add("load_failure@handed_over")
    answer = (
        await ask(d.port, completion(stream, prompt=LONG, kv_transfer_params=await handle(p)))
    ).answer
    assert answer.texts == ["error", "[DONE]"] if stream else answer.status == 500
    assert d.engine.stats.failed_transfers == 1


@pytest.mark.parametrize("kind", ["eof", "reset"])
async def test_decode_ends_while_the_kv_is_on_its_way(pair, kind):
    p, d = pair
    d.faults.add(f"{kind}@handed_over")
    seen = await (
        await ask(d.port, completion(True, prompt=LONG, kv_transfer_params=await handle(p)))
    ).end()
    assert seen.ended == kind
    assert not seen.answer.chunks
    await until(lambda: not p.engine.handles)


async def test_a_release_uses_up_no_fault(pair):
    p, d = pair
    d.faults.add("reset")
    given = await handle(p)
    answer = (
        await ask(d.port, completion(prompt=LONG, max_tokens=0, kv_transfer_params=given))
    ).answer
    assert answer.status == 400
    assert d.faults.armed
    assert d.releases[-1].kv == given


# -- routes that don't generate


async def test_a_fault_for_another_route(sim):
    sim.faults.add("status:path=/health,status=503,next=1")
    assert (await ask(sim.port, completion())).answer.status == 200
    assert [(await ask(sim.port, get("/health"))).answer.status for _ in range(2)] == [503, 200]


async def test_errors_of_the_engine_have_no_later_moments(sim):
    sim.faults.add("reset@head")
    sim.faults.add("reset@after")
    assert (await ask(sim.port, post(COMPLETIONS, prompt=""))).answer.status == 400
    assert len(sim.faults.armed) == 2
