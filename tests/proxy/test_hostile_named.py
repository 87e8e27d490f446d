"""Engines that break the rules of Responses and Messages streams: bounded, an honest end, and
nothing is left.
"""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.observe.events import LegFailed
from pdproxy.wire.api_errors import MAX_EVENT
from tests.fakes import answers, named, scripts
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply
from tests.fakes.named import body
from tests.fakes.passed import MESSAGES, RESPONSES
from tests.fakes.world import CHAT_TEXT, LONG, until, world
from tests.proxy.test_hostile_engines import LET_THROUGH, STREAM, Endless, bounded, framed
from tests.proxy.test_nothing_inside import HANDLE

ROUTES = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
PREAMBLE = {
    RESPONSES: ("response.created", "response.in_progress"),
    MESSAGES: ("message_start", "content_block_start"),
}
DELTA = {RESPONSES: "response.output_text.delta", MESSAGES: "content_block_delta"}
USAGE = {"input_tokens": 20, "output_tokens": 3}


def event(kind: str, **fields: object) -> bytes:
    """An event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), answers.compact({"type": kind, **fields}))


def delta(path: str, number: int, **more: object) -> bytes:
    """An event with a token."""
    if path == RESPONSES:
        return event(DELTA[path], delta=" a", sequence_number=number, **more)
    return event(DELTA[path], delta={"text": " a", "type": "text_delta"}, index=0, **more)


def beginning(path: str, tokens: int = 3) -> list[bytes]:
    """The first events of a stream, with some tokens."""
    first = [event(kind, sequence_number=number) for number, kind in enumerate(PREAMBLE[path])]
    return [*first, *(delta(path, number) for number in range(2, 2 + tokens))]


def ending(path: str, number: int, **more: object) -> list[bytes]:
    """The last events of a stream. `more`: fields where an answer has them."""
    if path == RESPONSES:
        response = {"status": "completed", "usage": USAGE, **more}
        return [event("response.completed", response=response, sequence_number=number)]
    given = {"stop_reason": "end_turn"}
    return [event("message_delta", delta=given, usage=USAGE, **more), event("message_stop")]


def same(one: object, other: object) -> bool:
    """Whether two are equal: pytest would show the difference of megabytes."""
    return one == other


BEFORE = {
    "pings": event("ping"),
    "openings of items": event("response.output_item.added", item={}, sequence_number=2),
    "openings of blocks": event("content_block_start", index=0),
    "the name of an event": b"event: " + b"x" * 8192,
    "the data of an event": b"event: response.completed\ndata: {" + b'"a":1,' * 1000,
    "an event that fills two names": b"event: a\nevent: b\n" * 500,
}


@ROUTES
@pytest.mark.parametrize("name", BEFORE)
async def test_what_has_no_end_before_the_first_output(path: str, name: str) -> None:
    """The client learns the bound, with the status of an error; no engine is blamed for what may
    have been asked for.
    """
    async with bounded(leaves=True) as w:
        script = Endless(STREAM, framed(BEFORE[name]))
        w.decode[0].default = script
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, script.sent < LET_THROUGH) == (502, True)
        said = answer.json["error"]["message"]
        assert "127.0.0.1" not in said
        if "almost empty" in said:
            assert w.proxy.ledger.engines[1].failures
        else:
            assert "bytes" in said
            assert w.proxy.ledger.engines[1].failures == 0


BEHIND = {
    **{name: BEFORE[name] for name in ("the name of an event", "the data of an event")},
    "tiny events": b"event: a\ndata: {}\n\n" * 600,
    "carriage returns": b"event: response.output_text.delta\rdata: {}\r\r\n\n",
    "lines of one event": b"data: {}\n" * 1000,
}


@ROUTES
@pytest.mark.parametrize("name", BEHIND)
async def test_what_has_no_end_behind_output(path: str, name: str) -> None:
    """The events so far and an error event of the API, all whole; the engine's leg is closed."""
    script = Endless(b"", framed(BEHIND[name]))
    sent = beginning(path)

    async with bounded(decode=2, leaves=True) as w:

        async def data_first(reply: Reply) -> None:
            await reply.start()
            await reply.pieces(*sent)
            await w.flowing(w.decode[1])
            await script(reply)

        w.decode[1].script(data_first)
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, answer.ended, script.sent < LET_THROUGH) == (200, True, True)
        assert answer.events[:-1] == sent
        failed = named.failure(path, answer)
        assert failed is not None
        assert not w.decode[0].requests
        assert len(w.events(LegFailed)) <= 1


@ROUTES
async def test_events_without_an_end_are_over_at_the_deadline_of_the_request(path: str) -> None:
    """With an error event whose number follows those of thousands of events."""
    clock, count = ManualClock(), 3000
    sent = beginning(path, count)

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*sent)
        await reply.stall()

    async with world(decode=2, deadlines={"total": 50}, clock=clock, leaves=True) as w:
        w.decode[1].script(script)
        client = await w.client()
        client.post(path, body(path, stream=True))
        answer, size = await client.head(), sum(map(len, sent))
        while len(answer.body) < size:
            answer.body += await client.piece()
        await clock.reach(50)
        await client.rest(answer)
        assert same(answer.events[:-1], sent)
        assert named.failure(path, answer) is not None
        assert (await w.ended()).outcome != "ok"
        await w.quiet()


@ROUTES
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "what", ["the end again", "a delta", "an error", "[DONE]", "half an event"]
)
async def test_what_comes_behind_the_end_is_dropped(path: str, what: str, at_once: bool) -> None:
    """The stream has ended for its client and its books."""
    begun = beginning(path)
    good = ending(path, 5)
    behind = {
        "the end again": b"".join(ending(path, 6)),
        "a delta": delta(path, 6),
        "an error": event("error", error={"type": "x", "message": "y"}),
        "[DONE]": b"data: [DONE]\n\n",
        "half an event": b"event: respon",
    }[what]

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*begun)
        await w.flowing(w.decode[0])
        await (reply.piece(b"".join(good) + behind) if at_once else reply.pieces(*good, behind))
        await reply.finish()

    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, answer.ended) == (200, True)
        assert answer.body == b"".join((*begun, *good))
        ended = await w.ended()
        assert (ended.outcome, ended.completion_tokens) == ("ok", 3)
        await w.quiet()


async def test_numbers_that_jump() -> None:
    """They are the engine's doing: its events pass as they are, and an error event ends them."""
    numbers = [2, 7, 5000, 5001, 5002, 5003, 6000]
    sent = [*beginning(RESPONSES, 0), *(delta(RESPONSES, number) for number in numbers)]

    async def script(reply: Reply) -> None:
        await reply.start()
        for one in sent:
            await reply.piece(one)
            await asyncio.sleep(0.01)
        reply.eof()

    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(RESPONSES, body(RESPONSES, stream=True))
        assert answer.events[:-1] == sent
        _, data = named.parts(answer.events[-1])
        assert isinstance(data["sequence_number"], int)
        await w.quiet()


@ROUTES
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
async def test_a_handle_in_an_event_is_hidden(path: str, name: str) -> None:
    """In the first event, in one that would take the fast path, and in the last ones; the other
    bytes stay.
    """
    handle: dict[str, object] = {name: HANDLE}
    events = [
        event(PREAMBLE[path][0], response={"id": "r", **handle}, sequence_number=0),
        event(PREAMBLE[path][1], sequence_number=1, **handle),
        *(delta(path, number) for number in range(2, 6)),
        delta(path, 6, **handle),
        delta(path, 7),
        *ending(path, 8, **handle),
    ]

    async def script(reply: Reply) -> None:
        await reply.start()
        for one in events:
            await reply.piece(one)
            await asyncio.sleep(0.01)
        await reply.finish()

    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(path, body(path, stream=True))
        assert answer.ended
        assert b"10.1.2.3" not in answer.body
        assert b"deadbeef" not in answer.body
        hidden = [one.replace(answers.compact(HANDLE), b"null") for one in events]
        assert answer.events == hidden
        assert (await w.ended()).completion_tokens == 3
        await w.quiet()


PREFILLS = {
    "ids without end": b'{"object":"response","type":"message","input_messages":[{"tokens":[1'
    + b",1" * 400_000
    + b"]}]}",
    "a message without end": b'{"object":"response","type":"message","input_messages":[{"message":"'
    + b"a" * 900_000
    + b'"}]}',
    "many messages": b'{"object":"response","type":"message","input_messages":['
    + b"{}," * 300_000
    + b"{}]}",
    "deep ones": b'{"object":"response","type":"message","input_messages":' + b"[" * 5000,
    "of another type": b'{"object":"response","type":"message","input_messages":7}',
    "no usage": b'{"object":"response","type":"message","kv_transfer_params":{"a":1}}',
}


@ROUTES
@pytest.mark.parametrize("name", PREFILLS)
async def test_a_prefill_that_is_no_answer(path: str, name: str) -> None:
    """The next engine's handle is used."""
    async with bounded(prefill=2) as w:
        w.prefill[1].script(scripts.whole(PREFILLS[name]))
        answer = await w.ask(path, body(path))
        assert (answer.status, named.text_of(answer)) == (200, CHAT_TEXT)
        assert w.proxy.ledger.engines[1].failures == 1
        await w.quiet()
        assert w.books.endings == {"loaded": 1}


@ROUTES
async def test_a_slow_reader_of_named_events(path: str) -> None:
    """The decode engine waits for it, and it gets every byte, whichever way the events took."""
    count = 40_000
    sent, last = beginning(path, count), ending(path, count + 2)

    async def script(reply: Reply) -> None:
        await reply.start()
        for at in range(0, len(sent), 50):
            await reply.piece(b"".join(sent[at : at + 50]))
        await reply.pieces(*last)
        await reply.finish()

    async with world() as w:
        w.decode[0].script(script)
        client = await w.client(receive_buffer=1 << 16)
        client.post(path, body(path, stream=True))
        head = await client.head()
        await until(lambda: any(one.transport.get_write_buffer_size() for one in w.connections))
        answer = await asyncio.wait_for(client.rest(head), LONG)
        assert answer.ended
        assert same(answer.body, b"".join((*sent, *last)))
        ended = await w.ended()
        assert (ended.outcome, ended.completion_tokens) == ("ok", 3)
        await w.quiet()


@ROUTES
async def test_a_last_event_that_repeats_a_large_answer(path: str) -> None:
    """It passes up to the bound of events, and its usage is read."""
    text = "x" * 3_000_000
    sent = [*beginning(path), *ending(path, 5, output_messages=[{"message": text}])]

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*sent)
        await reply.finish()

    assert len(text) < MAX_EVENT
    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(path, body(path, stream=True))
        assert same(answer.body, b"".join(sent))
        assert (await w.ended()).completion_tokens == 3
        await w.quiet()


def _items(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def _deep(opening: str, closing: str, inmost: str = "") -> str:
    return opening * 5000 + inmost + closing * 5000


ITEM = '{"role":"user","content":"a"}'
RESULT = '[{"type":"tool_result","content":'
BODIES = {
    "many items": (RESPONSES, f'"input":{_items(ITEM, 100_000)}'),
    "many messages": (MESSAGES, f'"messages":{_items(ITEM, 100_000)}'),
    "deep items": (RESPONSES, f'"input":[{{"role":"user","content":{_deep("[", "]")}}}]'),
    "deep messages": (MESSAGES, f'"messages":[{{"role":"user","content":{_deep("[", "]")}}}]'),
    "deep results": (
        MESSAGES,
        f'"messages":[{{"role":"user","content":{_deep(RESULT, "}]", "1")}}}]',
    ),
    "deep tools": (RESPONSES, f'"input":"a","tools":{_deep("[", "]")}'),
    "deep schemas": (RESPONSES, '"input":"a","text":' + _deep('{"a":', "}", "1")),
    "many parts": (
        RESPONSES,
        '"input":[{"role":"user","content":'
        + _items('{"type":"input_text","text":"a"}', 50_000)
        + "}]",
    ),
    "a large number": (MESSAGES, f'"messages":{_items(ITEM, 1)},"max_tokens":{"9" * 4000}'),
}


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("name", BODIES)
async def test_bodies_that_mean_harm(name: str, stream: str) -> None:
    """They are answered, or refused with a client's error; the next request is served."""
    path, fields = BODIES[name]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    more = "" if limit in fields else f'"{limit}":2,'
    asked = f'{{"model":"tiny",{more}"stream":{stream},{fields}}}'.encode()
    async with world(leaves=True) as w:
        client = await w.client()
        client.post(path, asked)
        answer = await client.answer()
        assert answer.status in (200, 400, 413, 422), answer.body[:300]
        assert answer.ended
        after = await w.ask(path, body(path))
        assert (after.status, named.text_of(after)) == (200, CHAT_TEXT)
        await w.quiet()
