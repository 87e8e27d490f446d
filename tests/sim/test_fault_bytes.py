"""Faults in the bytes of an answer, as a client reads them off the socket."""

import json
import random
import re

import pytest

from pdproxy_lab.sim import writing
from pdproxy_lab.sim.faults.answers import NO_HTTP
from pdproxy_lab.sim.write_style import cut
from tests.sim.moments import STREAM_MOMENTS, WORDS
from tests.sim.raw import Raw, ask, chat, completion, get, until

# -- bytes that are wrong


@pytest.mark.parametrize(
    "at", ["before_first_token", "mid_stream", "last_chunk", "before_done", "head"]
)
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
    await client.until(lambda: NO_HTTP in client.data)
    assert client.data.endswith(NO_HTTP)
    assert len(client.answer.chunks) == STREAM_MOMENTS.get(at, 0)
    if close == "true":
        assert (await client.end()).ended == "eof"
    else:
        await ask(sim.port, get("/health"))
        assert not client.ended


async def test_bytes_that_belong_to_no_answer_follow_one(sim):
    sim.faults.add("garbage@after")
    seen = await ask(sim.port, completion())
    await seen.until(lambda: seen.data.endswith(NO_HTTP))


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


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("make", [completion, chat])
async def test_a_stream_that_was_given_up_before_its_first_token(sim, make, usage):
    """vLLM sends nothing of the choice, not even that it was aborted (chat_completion/serving.py,
    "Chunked prefill case").
    """
    sim.faults.add("abort_finish@before_first_token")
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = (await ask(sim.port, make(stream=True, **options))).answer
    assert answer.complete
    *events, end = answer.chunks
    assert end == b"data: [DONE]\n\n"
    choices = [json.loads(event.removeprefix(b"data: "))["choices"] for event in events]
    assert [one[0]["delta"]["role"] for one in choices if one] == (
        ["assistant"] if make is chat else []
    )
    assert choices.count([]) == usage


@pytest.mark.parametrize("make", [completion, chat])
async def test_text_behind_an_error(sim, make):
    """In one write: a reader that stops at the error's event has what follows in its hand."""
    sim.faults.add("text_after_error")
    answer = (await ask(sim.port, make(stream=True))).answer
    assert answer.complete
    error, first, second, end, _ = answer.chunks[-1].split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500
    assert first == second
    assert json.loads(first.removeprefix(b"data: "))["choices"]
    assert end == b"data: [DONE]"


@pytest.mark.parametrize("at", ["mid_stream", "last_chunk"])
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
    data = bytes(range(20))
    places = set()
    for seed in range(200):
        pieces = cut(data, 2, random.Random(seed))
        assert b"".join(pieces) == data
        assert len(pieces) == 3
        places |= {len(pieces[0]), len(pieces[0]) + len(pieces[1])}
    assert places == set(range(1, 20))
    assert cut(b"abc", 0, random.Random(0)) == [b"a", b"b", b"c"]
    assert cut(b"ab", 5, random.Random(0)) == [b"a", b"b"]
    assert cut(b"a", 3, random.Random(0)) == [b"a"]


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
    # its first wait is the request's own
    assert waits == [0.004] * (writes - spec.endswith("queued"))
