"""Faults: the book, and what a client reads off the socket for each kind at each moment."""

import asyncio
import json
import re

import pytest

from pdproxy.sim import writing
from pdproxy.sim.facts import Facts, Hardware
from pdproxy.sim.faults import Fault, FaultBook, FaultError, Situation, fault_of, parse
from pdproxy.sim.kinds import KINDS
from pdproxy.sim.server import SimServer
from pdproxy.sim.transport import GARBAGE
from tests.sim.raw import COMPLETIONS, Raw, ask, chat, completion, get, post, turns, until

FAST = Hardware(speed=0)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
WORDS = 4
STREAM_MOMENTS = {
    "prefilling": 0,
    "head": 0,
    "before_first_token": 0,
    "mid_stream": 2,
    "last_chunk": WORDS - 1,
    "before_done": WORDS,
}
"""Moments of a stream, and how many events are out by then."""


@pytest.fixture
async def sim():
    async with SimServer(Facts(hardware=FAST, eos_every=0), chance=7) as made:
        yield made
        assert not made.crashes


@pytest.fixture
async def pair():
    facts = {"hardware": FAST, "eos_every": 0, "handshake_timeout": 0.2}
    async with (
        SimServer(Facts(role="prefill", **facts), chance=1) as p,
        SimServer(Facts(role="decode", **facts), chance=2) as d,
    ):
        yield p, d
        assert not p.crashes
        assert not d.crashes


async def handle(p):
    answer = (await ask(p.port, completion(prompt=LONG, max_tokens=1, kv_transfer_params=PREFILL))).answer
    return answer.json["kv_transfer_params"]


# -- the book


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_text_form_and_a_default_moment(kind):
    fault = parse(kind)
    assert fault.at == KINDS[kind].moments[0]
    assert fault.args == KINDS[kind].args
    assert fault.next == (None if kind == "refuse" else 1)


def test_a_spec_says_all_that_a_fault_can():
    fault = parse("status@prefilling:next=3,status=503,stream=false,path=/v1/completions,seed=4")
    assert fault == Fault(
        kind="status",
        at="prefilling",
        next=3,
        stream=False,
        path="/v1/completions",
        seed=4,
        args={"status": 503},
    )
    assert parse("reset@mid_stream:rate=0.1").rate == 0.1
    assert fault_of({"kind": "status", "args": {"status": 503}}) == fault_of({"kind": "status", "status": 503})


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nonsense", "kind"),
        ("reset@never", "at"),
        ("status@mid_stream", "mid_stream"),
        ("reset:next=0", "next"),
        ("reset:next=x", "next"),
        ("reset:rate=1.5", "rate"),
        ("reset:rate=0", "rate"),
        ("reset:next=1,rate=0.5", "exclude"),
        ("reset:delay=1", "delay"),
        ("reset:next", "KEY=VALUE"),
        ("slow:delay=x", "delay"),
        ("slow:delay=-1", "delay"),
        ("status:status=99", "status"),
        ("garbage:what=xml", "what"),
        ("garbage@after:what=json", "json"),
        ("no_done:stream=false", "whole"),
        ("refuse:next=1", "next"),
        ("reset:events=0", "events"),
        ("reset:next=1,next=2", "next"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_by_name(spec, named):
    with pytest.raises(FaultError, match=named) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)


def situation(path=COMPLETIONS, **more):
    return Situation(path=path, generating=path.startswith("/v1/"), **more)


def test_next_counts_requests_and_then_the_fault_is_gone():
    book = FaultBook()
    book.add("reset:next=2")
    assert [len(list(book.due("queued", situation()))) for _ in range(3)] == [1, 1, 0]
    assert not book.armed
    assert book.happened == {"reset@queued": 2}


def test_a_rate_is_drawn_by_seed():
    def drawn(**more):
        book = FaultBook()
        book.add(Fault(kind="reset", rate=0.3, **more))
        return [bool(list(book.due("queued", situation()))) for _ in range(200)]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert 30 < sum(drawn(seed=1)) < 90


@pytest.mark.parametrize(
    ("spec", "at", "now"),
    [
        ("reset@head", "queued", situation()),
        ("reset", "queued", situation("/health")),
        ("reset:path=/health", "queued", situation()),
        ("reset", "queued", situation(release=True)),
        ("reset:stream=true", "queued", situation()),
        ("reset:stream=false", "queued", situation(stream=True)),
        ("reset@mid_stream", "mid_stream", situation(stream=True, events=1)),
        ("error_event@queued", "queued", situation()),
        ("status@prefilling", "prefilling", situation(stream=True, head_out=True)),
    ],
)
def test_a_fault_that_does_not_fit_stays_armed(spec, at, now):
    book = FaultBook()
    book.add(spec)
    assert not list(book.due(at, now))
    assert book.armed


def test_filters_let_through_what_they_name():
    book = FaultBook()
    for spec in ("reset:path=/health", "reset:releases=true", "reset:stream=true", "reset@mid_stream:events=1"):
        book.add(spec)
    assert list(book.due("queued", situation("/health")))
    assert list(book.due("queued", situation(release=True)))
    assert list(book.due("queued", situation(stream=True)))
    assert list(book.due("mid_stream", situation(stream=True, events=1)))


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
@pytest.mark.parametrize(("at", "head"), [("prefilling", False), ("last_chunk", False), ("head", True)])
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
    await asyncio.wait_for(sim.requests[-1].left.wait(), 5)


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
    await asyncio.wait_for(sim.requests[-1].left.wait(), 5)


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
        assert (await client.end()).ended in (kind, "eof" if kind == "reset" else kind)
    else:
        client.send(completion())
        await ask(sim.port, get("/health"))
        assert client.data == (GARBAGE if kind == "garbage" else b"")
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
    await sim.journal.asked()
    sim.faults.add("refuse")
    go_on.set()
    assert (await client.whole()).answer.status == 200


def gated(event):
    async def script(reply):
        await event.wait()
        await reply.serve()

    return script


# -- bytes that are wrong


@pytest.mark.parametrize("at", ["before_first_token", "mid_stream", "last_chunk", "before_done", "head"])
async def test_a_stream_is_cut_inside_a_chunk(sim, at):
    sim.faults.add(f"half_chunk@{at}")
    seen = await (await ask(sim.port, completion(stream=True))).end()
    assert seen.ended == "eof"
    assert len(seen.answer.chunks) == STREAM_MOMENTS[at]
    size, _, part = seen.answer.rest.partition(b"\r\n")
    assert 0 < len(part) < int(size, 16)
    assert part.startswith(b"data: "[: len(part)])


@pytest.mark.parametrize("at", ["head", "last_chunk"])
async def test_a_whole_answer_is_cut_inside_its_body(sim, at):
    sim.faults.add(f"half_chunk@{at}")
    seen = await (await ask(sim.port, completion())).end()
    assert seen.ended == "eof"
    assert 0 < len(seen.answer.body) < int(seen.answer.headers["content-length"])


@pytest.mark.parametrize("at", ["queued", *STREAM_MOMENTS])
@pytest.mark.parametrize("close", ["true", "false"])
async def test_bytes_that_are_no_http(sim, at, close):
    sim.faults.add(f"garbage@{at}:close={close}")
    client = await Raw.connect(sim.port)
    client.send(completion(stream=True))
    await client.until(lambda: GARBAGE in client.data)
    assert client.data.endswith(GARBAGE)
    assert len(client.answer.chunks) == STREAM_MOMENTS.get(at, 0)
    if close == "true":
        assert (await client.end()).ended == "eof"
    else:
        await ask(sim.port, get("/health"))
        assert not client.ended


async def test_bytes_that_belong_to_no_answer_follow_one(sim):
    sim.faults.add("garbage@after")
    seen = await ask(sim.port, completion())
    await seen.until(lambda: seen.data.endswith(GARBAGE))


@pytest.mark.parametrize("at", ["queued", *STREAM_MOMENTS])
async def test_an_event_that_is_no_json(sim, at):
    sim.faults.add(f"garbage@{at}:what=json")
    answer = (await ask(sim.port, completion(stream=True))).answer
    assert answer.complete
    assert answer.chunks[-1] == b"data: [DONE]\n\n"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.chunks[-2].removeprefix(b"data: "))
    assert len(answer.chunks) == STREAM_MOMENTS.get(at, 0) + 2


@pytest.mark.parametrize("at", ["queued", "prefilling", "last_chunk", "head"])
async def test_a_body_that_is_no_json(sim, at):
    sim.faults.add(f"garbage@{at}:what=json")
    answer = (await ask(sim.port, completion())).answer
    assert answer.status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.body)


# -- answers that are others


@pytest.mark.parametrize("at", ["queued", "prefilling", "last_chunk"])
@pytest.mark.parametrize("status", [500, 503, 429, 302])
async def test_another_status(sim, at, status):
    sim.faults.add(f"status@{at}:status={status}")
    seen = await ask(sim.port, completion())
    assert seen.answer.status == status
    if status == 302:
        assert seen.answer.headers["location"] == "/elsewhere"
    else:
        assert seen.answer.json["error"]["code"] == status
    seen.pieces.clear()
    seen.send(completion())
    assert (await seen.whole()).answer.status == 200, "the connection can be used again"


async def test_a_status_for_a_stream_comes_before_its_head_and_with_a_body_of_choice(sim):
    sim.faults.add('status:status=503,body={"detail":"no"}')
    answer = (await ask(sim.port, completion(stream=True))).answer
    assert (answer.status, answer.body) == (503, b'{"detail":"no"}')


@pytest.mark.parametrize("at", ["queued", "prefilling", "last_chunk"])
async def test_a_body_of_no_bytes(sim, at):
    sim.faults.add(f"empty_body@{at}")
    answer = (await ask(sim.port, completion())).answer
    assert (answer.status, answer.headers["content-length"], answer.complete) == (200, "0", True)


@pytest.mark.parametrize("at", ["queued", "prefilling", "head"])
@pytest.mark.parametrize("done", ["true", "false"])
async def test_a_stream_without_an_event(sim, at, done):
    sim.faults.add(f"empty_stream@{at}:done={done}")
    answer = (await ask(sim.port, completion(stream=True))).answer
    assert answer.complete
    assert answer.texts == (["[DONE]"] if done == "true" else [])


@pytest.mark.parametrize("at", ["queued", *STREAM_MOMENTS])
@pytest.mark.parametrize("done", ["true", "false"])
async def test_an_error_event(sim, at, done):
    sim.faults.add(f"error_event@{at}:done={done},code=503,message=gone")
    seen = await ask(sim.port, completion(stream=True))
    out = STREAM_MOMENTS.get(at, 0)
    assert seen.answer.status == 200
    assert seen.answer.complete
    assert seen.answer.texts[out:] == ["error", "[DONE]"][: 1 + (done == "true")]
    error = json.loads(seen.answer.chunks[out].removeprefix(b"data: "))["error"]
    assert (error["code"], error["message"]) == (503, "gone")
    await until(lambda: not sim.engine.stats.running)


async def test_a_chat_says_its_role_before_the_first_token(sim):
    sim.faults.add("error_event@before_first_token")
    assert (await ask(sim.port, chat(stream=True))).answer.texts == ["role", "error", "[DONE]"]


@pytest.mark.parametrize("at", ["before_first_token", "mid_stream", "last_chunk", "before_done"])
async def test_a_stream_that_ends_well_without_its_end_mark(sim, at):
    sim.faults.add(f"no_done@{at}")
    answer = (await ask(sim.port, completion(stream=True))).answer
    assert answer.complete
    assert len(answer.texts) == STREAM_MOMENTS[at]
    assert "[DONE]" not in answer.texts


@pytest.mark.parametrize("at", ["before_first_token", "mid_stream", "last_chunk"])
@pytest.mark.parametrize("make", [completion, chat])
async def test_a_stream_that_was_given_up(sim, at, make):
    sim.faults.add(f"abort_finish@{at}")
    answer = (await ask(sim.port, make(stream=True))).answer
    assert answer.complete
    assert answer.chunks[-1] == b"data: [DONE]\n\n"
    choice = json.loads(answer.chunks[-2].removeprefix(b"data: "))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
    assert list(choice).index("stop_reason") == list(choice).index("finish_reason") + 1


@pytest.mark.parametrize("make", [completion, chat])
async def test_a_whole_answer_that_was_given_up(sim, make):
    sim.faults.add("abort_finish@last_chunk")
    answer = (await ask(sim.port, make())).answer
    assert answer.json["choices"][0]["finish_reason"] == "abort"


# -- the same bytes, written otherwise


async def as_ever(sim, data):
    seen = await ask(sim.port, data)
    return same(seen.data)


def same(data):
    return re.sub(rb'date: [^\r]*|"id":"[^"]*"|"created":\d+', b"", data)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("seed", range(5))
async def test_split_writes_are_the_same_bytes_in_more_pieces(sim, stream, seed):
    expected = await as_ever(sim, completion(stream=stream))
    sim.faults.add(f"split@queued:seed={seed}")
    seen = await ask(sim.port, completion(stream=stream))
    assert same(seen.data) == expected
    assert len(seen.pieces) > 6


async def test_bytes_can_come_one_by_one(sim):
    sim.faults.add("split@before_done:cuts=0")
    seen = await ask(sim.port, completion(stream=True))
    assert seen.answer.texts[-1] == "[DONE]"
    assert all(len(piece) <= 3 for piece in seen.pieces[-8:])


def test_cuts_fall_everywhere_in_the_long_run():
    import random

    data = bytes(range(20))
    places = set()
    for seed in range(200):
        pieces = writing.cut(data, 2, random.Random(seed))
        assert b"".join(pieces) == data
        assert len(pieces) == 3
        places |= {len(pieces[0]), len(pieces[0]) + len(pieces[1])}
    assert places == set(range(1, 20))
    assert writing.cut(b"abc", 0, random.Random(0)) == [b"a", b"b", b"c"]
    assert writing.cut(b"ab", 5, random.Random(0)) == [b"a", b"b"]
    assert writing.cut(b"a", 3, random.Random(0)) == [b"a"]


@pytest.mark.parametrize("at", ["head", "mid_stream"])
async def test_events_joined_in_one_write(sim, at):
    expected = await as_ever(sim, completion(stream=True))
    sim.faults.add(f"join@{at}:count=0")
    seen = await ask(sim.port, completion(stream=True))
    assert same(seen.data) == expected
    assert seen.pieces[-1].count(b"\r\ndata: ") >= WORDS - STREAM_MOMENTS[at]


async def test_a_join_goes_out_before_another_fault_ends_the_stream(sim):
    sim.faults.add("join@head:count=0")
    sim.faults.add("eof@last_chunk")
    seen = await (await ask(sim.port, completion(stream=True))).end()
    assert len(seen.answer.chunks) == WORDS - 1


@pytest.mark.parametrize(
    ("spec", "writes"), [("slow@queued", WORDS + 4), ("slow@mid_stream", 4), ("slow@last_chunk", 3)]
)
async def test_slow_waits_before_every_write_from_its_moment_on(sim, spec, writes, monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    sim.faults.add(f"{spec}:delay=0.004")
    monkeypatch.setattr(writing, "sleep", sleep)
    assert (await ask(sim.port, completion(stream=True))).answer.complete
    assert waits == [0.004] * (writes - spec.endswith("queued"))  # its first wait is the request's own


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
    await asyncio.wait_for(sim.requests[-1].left.wait(), 5)


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
    p, d = pair
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
    ("spec", "status"), [("reset", None), ("status:status=503", 503), ("garbage:what=json", 200), ("empty_body", 200)]
)
async def test_the_answer_with_the_handle_is_lost(pair, spec, status):
    p, _ = pair
    kind, _, rest = spec.partition(":")
    p.faults.add(f"{kind}@handed_over:{rest}".rstrip(":"))
    answer = (await ask(p.port, completion(prompt=LONG, max_tokens=1, kv_transfer_params=PREFILL))).answer
    assert answer.status == status
    assert len(p.engine.handles) == 1, "the KV waits, and nobody knows its handle"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_load_fails(pair, stream):
    p, d = pair
    d.faults.add("load_failure@handed_over")
    answer = (await ask(d.port, completion(stream, prompt=LONG, kv_transfer_params=await handle(p)))).answer
    assert answer.texts == ["error", "[DONE]"] if stream else answer.status == 500
    assert d.engine.stats.failed_transfers == 1


@pytest.mark.parametrize("kind", ["eof", "reset"])
async def test_decode_ends_while_the_kv_is_on_its_way(pair, kind):
    p, d = pair
    d.faults.add(f"{kind}@handed_over")
    seen = await (await ask(d.port, completion(True, prompt=LONG, kv_transfer_params=await handle(p)))).end()
    assert seen.ended == kind
    assert not seen.answer.chunks
    await until(lambda: not p.engine.handles)


async def test_a_release_uses_up_no_fault(pair):
    p, d = pair
    d.faults.add("reset")
    given = await handle(p)
    answer = (await ask(d.port, completion(prompt=LONG, max_tokens=0, kv_transfer_params=given))).answer
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
