"""On Responses, Messages and Cohere's chat KV moves, and faults happen, as on chats."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST, WORDS
from tests.sim.raw import PATIENCE, Answer, Raw, ask, post, turns, until

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = [RESPONSES, MESSAGES]
NEW = "0.33.0"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen"
)
OTHER = LONG.replace("one", "two")
EVENTS: dict[str, dict[Moment, int]] = {
    RESPONSES: {
        "prefilling": 2,
        "head": 0,
        "before_first_token": 4,
        "mid_stream": 6,
        "last_chunk": WORDS + 7,
    },
    MESSAGES: {
        "prefilling": 0,
        "head": 0,
        "before_first_token": 2,
        "mid_stream": 4,
        "last_chunk": WORDS + 3,
        "before_done": WORDS + 4,
    },
}
"""How many events are out at each moment of a stream."""
MOMENTS = [(path, at) for path, found in EVENTS.items() for at in found]


def body(path: str, text: str = LONG, limit: int = WORDS, **more: Any) -> dict[str, Any]:
    """A request of a route."""
    if path == RESPONSES:
        own = {"input": text, "max_output_tokens": limit}
    else:
        own = {"messages": [{"role": "user", "content": text}], "max_tokens": limit, "model": "sim"}
    return {**own, "temperature": 0, **more}


async def answered(sim: SimServer, path: str, *args: Any, **more: Any) -> Answer:
    return (await ask(sim.port, post(path, **body(path, *args, **more)))).answer


async def handle(p: SimServer, path: str, text: str = LONG, **more: Any) -> dict[str, Any]:
    """P's handle of a text."""
    found = (await answered(p, path, text, 1, kv_transfer_params=PREFILL, **more)).json
    assert found.get("status", found.get("stop_reason")) in ("incomplete", "max_tokens")
    return dict(found["kv_transfer_params"])


def events(answer: Answer) -> list[dict[str, Any]]:
    """A stream's events; their names are their types."""
    found = []
    for event in b"".join(answer.chunks).decode().split("\n\n")[:-1]:
        name, _, data = event.removeprefix("event: ").partition("\ndata: ")
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def text_of(answer: Answer) -> str:
    """What an answer says."""
    if "chunked" in answer.headers.get("transfer-encoding", ""):
        deltas = [event.get("delta") for event in events(answer)]
        return "".join(d if isinstance(d, str) else (d or {}).get("text", "") for d in deltas)
    parts = answer.json.get("content") or answer.json["output"][0]["content"]
    return "".join(part["text"] for part in parts)


def pulled(d: SimServer) -> int:
    return d.engine.stats.prompt_tokens_by_source["external_kv_transfer"]


# -- KV


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_right_kv_is_moved_once(pair, sim, path, stream):
    """D computes nothing of the prompt and says what one engine alone does; P is free then. A
    handle that is used again, or for another prompt, gives wrong text and no error.
    """
    p, d = pair
    alone = text_of(await answered(sim, path))
    given = await handle(p, path)
    assert text_of(await answered(d, path, kv_transfer_params=given, stream=stream)) == alone
    assert pulled(d) == given["remote_num_tokens"]
    await until(lambda: not p.engine.handles)
    for used, text in ((given, LONG), (await handle(p, path), OTHER)):
        said = await answered(
            d, path, text, kv_transfer_params=used, stream=stream, cache_salt="new"
        )
        assert said.status == 200
        assert text_of(said) != text_of(await answered(sim, path, text))


@pytest.mark.parametrize("path", ROUTES)
async def test_ids_stand_for_the_prompt(pair, path):
    """D takes P's ids and does not read the text. Pictures make it read the text."""
    p, d = pair
    whole = await answered(p, RESPONSES, enable_response_messages=True)
    ids = whole.json["input_messages"][0]["tokens"]
    given = {**await handle(p, path), "prompt_token_ids": ids}
    said = text_of(await answered(d, path, "read by nobody", kv_transfer_params=given))
    assert said == text_of(whole)
    kind = "input_image" if path == RESPONSES else "image"
    message = {"role": "user", "content": [{"type": kind}]}
    field = "input" if path == RESPONSES else "messages"
    answer = await answered(d, path, kv_transfer_params=given, **{field: [message]})
    assert answer.status == 400
    assert "may be provided in one prompt" in answer.json["error"]["message"]


async def test_pushed_kv_is_matched_by_the_id_that_each_route_reads():
    """Responses read it from the body, messages from the header."""
    facts = msgspec.structs.replace(FAST, connector="nixl-push")
    async with (
        SimServer(msgspec.structs.replace(facts, role="prefill")) as p,
        SimServer(msgspec.structs.replace(facts, role="decode")) as d,
    ):
        place = {"remote_engine_id": p.engine.engine_id, "remote_host": "127.0.0.1"}
        promise = {"do_remote_prefill": True, "do_remote_decode": False, **place}
        promise |= {"remote_port": p.engine.side_channel_ports[0], "tp_size": 1}
        promise["remote_request_id"] = "made up"
        header = "x-request-id: both\r\n"
        named: dict[str, Any] = {"request_id": "both"}
        for path, more in ((RESPONSES, named), (MESSAGES, {})):
            legs = [
                (p, body(path, limit=1, kv_transfer_params=PREFILL, **more)),
                (d, body(path, kv_transfer_params=promise, **more)),
            ]
            before = pulled(d)
            one, two = await asyncio.gather(
                *(ask(sim.port, post(path, header, **sent)) for sim, sent in legs)
            )
            assert two.answer.status == 200
            assert text_of(two.answer).startswith(text_of(one.answer))
            assert pulled(d) > before


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_load_fails(pair, path, stream):
    p, d = pair
    d.faults.add("load_failure@handed_over")
    given = await handle(p, path)
    seen = await ask(d.port, post(path, **body(path, kv_transfer_params=given, stream=stream)))
    assert d.engine.stats.failed_transfers == 1
    if not stream:
        assert seen.answer.status == 500
    elif path == RESPONSES:
        assert (seen.ended, len(events(seen.answer)), seen.answer.complete) == ("eof", 2, False)
    else:
        kinds = [event["type"] for event in events(seen.answer)]
        assert (kinds, seen.answer.complete) == (["message_start", "error"], True)


async def test_a_handle_without_a_key_kills_d(pair):
    """D waits for ever, and dies when the request is given up: as on chats."""
    p, d = pair
    given = await handle(p, MESSAGES)
    del given["remote_request_id"]
    client = await Raw.connect(d.port)
    client.send(post(MESSAGES, **body(MESSAGES, kv_transfer_params=given)))
    await until(lambda: d.engine.stats.waiting == 1)
    client.leave()
    await until(lambda: d.engine.dead)


# -- faults


@pytest.mark.parametrize(("path", "at"), MOMENTS)
async def test_a_stream_ends_at_its_moment(sim, path, at):
    sim.faults.add(f"eof@{at}")
    seen = await (await ask(sim.port, post(path, **body(path, stream=True)))).end()
    assert seen.ended == "eof"
    assert len(seen.answer.chunks) == EVENTS[path][at]
    assert not seen.answer.complete


@pytest.mark.parametrize(("path", "at"), [one for one in MOMENTS if one[1] != "head"])
@pytest.mark.parametrize("version", ["0.32.0", NEW])
@pytest.mark.parametrize("kind", ["dead_core", "error_event"])
async def test_a_stream_fails_as_its_route_fails(path, at, version, kind):
    """Responses: the connection is closed. Messages: an error is the last event; only 0.33.0 closes
    the open block before it.
    """
    async with SimServer(msgspec.structs.replace(FAST, version=version)) as sim:
        sim.faults.add(f"{kind}@{at}")
        seen = await ask(sim.port, post(path, **body(path, stream=True)))
        assert not sim.crashes
        found = events(seen.answer)
        if path == RESPONSES:
            assert (seen.ended, seen.answer.complete) == ("eof", False)
            assert len(found) == EVENTS[path][at]
            return
        assert seen.answer.complete
        error = found.pop()
        assert error["error"]["type"] == ("api_error" if version == NEW else "internal_error")
        if version == NEW and at in ("before_first_token", "mid_stream"):
            assert found.pop() == {"type": "content_block_stop", "index": 0}
        assert len(found) == EVENTS[path][at]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("at", "stream"), [("mid_stream", True), ("last_chunk", True), ("last_chunk", False)]
)
async def test_an_aborted_answer_ends_in_order(sim, path, at, stream):
    """Responses are said to be complete then, messages have no reason."""
    sim.faults.add(f"abort_finish@{at}")
    seen = await ask(sim.port, post(path, **body(path, limit=20, stream=stream)))
    assert seen.answer.complete
    found = events(seen.answer) if stream else [seen.answer.json]
    if path == RESPONSES:
        ended = found[-1].get("response", found[-1])
        assert (ended["status"], ended["incomplete_details"]) == ("completed", None)
    elif stream:
        assert [event["type"] for event in found[-3:]] == [
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert found[-2]["delta"] == {"stop_reason": None, "stop_sequence": None}
    else:
        assert "stop_reason" not in found[0]
    if at == "mid_stream":
        assert sim.engine.stats.finished["abort"] == 1
        assert len(text_of(seen.answer).split()) < 20


@pytest.mark.parametrize("path", ROUTES)
async def test_statuses_have_the_routes_shape(sim, path):
    sim.faults.add("status:status=429")
    error = (await answered(sim, path)).json
    assert error.get("type") == ("error" if path == MESSAGES else None)
    assert error["error"]["type"] == "RateLimitError"


@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_leaves_ends_its_request(path):
    slow = msgspec.structs.replace(FAST.hardware, speed=1, decode_step_s=30)
    async with SimServer(msgspec.structs.replace(FAST, hardware=slow)) as sim:
        client = await Raw.connect(sim.port)
        client.send(post(path, **body(path, stream=True)))
        await until(lambda: sim.engine.stats.running)
        client.leave()
        await asyncio.wait_for(sim.requests[-1].left.wait(), PATIENCE)
        await until(lambda: not sim.engine.handles and not sim.engine._streams)
        await turns()


# -- thoughts


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_of_messages_are_blocks(stream):
    facts = msgspec.structs.replace(FAST, reasoning_parser="deepseek_r1")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with SimServer(facts, chance=7) as sim:
        answer = await answered(sim, MESSAGES, limit=1100, thinking=thinking, stream=stream)
        if not stream:
            assert [one["type"] for one in answer.json["content"]] == ["thinking", "text"]
            return
        kinds = [
            event.get("content_block", event.get("delta", {})).get("type")
            for event in events(answer)
        ]
        order = " ".join(kind for kind in kinds if kind)
        blocks = r"thinking( thinking_delta)+ signature_delta text( text_delta)+"
        assert re.fullmatch(blocks, order)


# -- Cohere's chat


def _chat(**more: Any) -> bytes:
    fields = {"messages": [{"role": "user", "content": LONG}], "max_tokens": WORDS, "model": "sim"}
    return post("/cohere/v2/chat", **{**fields, "temperature": 0, **more})


def _data(answer: Answer) -> list[Any]:
    """A stream's events without `[DONE]`, which is its last one."""
    *found, done = b"".join(answer.chunks).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    return [json.loads(one.removeprefix(b"data: ")) for one in found]


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_of_coheres_chat_moves(stream):
    facts = msgspec.structs.replace(FAST, enable_cohere_api=True, connector="nixl")
    async with (
        SimServer(msgspec.structs.replace(facts, role="prefill")) as p,
        SimServer(msgspec.structs.replace(facts, role="decode")) as d,
    ):
        whole = (await ask(p.port, _chat())).answer.json["message"]["content"][0]["text"]
        leg = (await ask(p.port, _chat(max_tokens=1, kv_transfer_params=PREFILL))).answer.json
        assert leg["finish_reason"] == "MAX_TOKENS"
        given = leg["kv_transfer_params"]
        answer = (await ask(d.port, _chat(kv_transfer_params=given, stream=stream))).answer
        if stream:
            deltas = [one["delta"]["message"]["content"] for one in _data(answer)[2:-2]]
            assert "".join(one["text"] for one in deltas) == whole
        else:
            assert answer.json["message"]["content"][0]["text"] == whole
        assert pulled(d) == given["remote_num_tokens"]
        await until(lambda: not p.engine.handles)


@pytest.mark.parametrize(
    ("at", "out"),
    [("head", 0), ("before_first_token", 2), ("mid_stream", 4), ("last_chunk", WORDS + 3)],
)
@pytest.mark.parametrize("version", ["0.32.0", NEW])
async def test_a_stream_of_coheres_chat_fails_in_order(at, out, version):
    """The reason is ERROR. A stream that has not begun has no event at all."""
    facts = msgspec.structs.replace(FAST, enable_cohere_api=True, version=version)
    async with SimServer(facts) as sim:
        sim.faults.add(f"dead_core@{at}")
        found = _data((await ask(sim.port, _chat(stream=True))).answer)
        assert not sim.crashes
        if out:
            assert found.pop()["delta"]["finish_reason"] == "ERROR"
        if version == NEW and at in ("before_first_token", "mid_stream"):
            assert found.pop()["type"] == "content-end"
        assert len(found) == out


async def test_an_aborted_stream_of_coheres_chat_is_complete():
    async with SimServer(msgspec.structs.replace(FAST, enable_cohere_api=True)) as sim:
        sim.faults.add("abort_finish@mid_stream")
        found = _data((await ask(sim.port, _chat(stream=True, max_tokens=20))).answer)
        assert found[-1]["delta"]["finish_reason"] == "COMPLETE"
        assert sim.engine.stats.finished["abort"] == 1
