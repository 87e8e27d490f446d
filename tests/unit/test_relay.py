"""The relay alone: however the bytes are cut, the client gets the same, and the same ending."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineRefusedError
from pdproxy.serving.stream import event_filter
from pdproxy.serving.stream.phase import STREAM_STARTED
from pdproxy.serving.stream.relay import Relay
from pdproxy.upstream.connection import EngineConnection, ForwardRead
from pdproxy.wire import sse
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.chunks import chunk, whole_chunks
from tests.fakes import answers
from tests.fuzz.cost.measure import steps

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

HEAD = [(b"content-type", b"text/event-stream; charset=utf-8")]
TEXT = answers.stream(False, 9, [" a", "é🦊", '\\n\\n "data: [DONE]"', "d"], with_usage=True)
EVENTS = 100
CHAT = answers.stream(True, 9, [" a", "b"], with_usage=True)


class Sink:
    """An output and a connection in one, in memory."""

    def __init__(self) -> None:
        self.body = b""
        self.paused = False
        self.take: ForwardRead | None = None

    def feed(self, piece: bytes, relay: Relay) -> None:
        """Hand on what a connection has read: as a chunk, once those are wanted."""
        if self.take is None or not self.take(chunk(piece)):
            relay.data(piece)

    def write(self, data: bytes) -> None:
        self.body += data

    def chunk_writer(self) -> Callable[[bytes], None]:
        return self.write_chunk

    def write_chunk(self, frame: bytes) -> None:
        (payload,), end = whole_chunks(frame)
        assert end == len(frame)
        self.write(payload)

    def offer_reads(self, take: ForwardRead) -> None:
        self.take = take

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        pass

    def pause(self) -> None:
        pass

    resume = pause


async def run(pieces: Sequence[bytes], relay: Relay, *, end: bool = True, late: int = 0) -> bytes:
    """Feed pieces; `flow` is called `late` pieces after the first data. Return what a client got;
    raise what it is told.
    """
    sink = Sink()
    relay.head(200, list(HEAD))
    waiting, flowing = late, False
    for piece in pieces:
        sink.feed(piece, relay)
        if relay.first.done() and not flowing:
            if waiting == 0:
                assert await relay.first is STREAM_STARTED
                relay.flow(sink, cast("EngineConnection", sink))  # type: ignore[arg-type]
                flowing = True
            waiting -= 1
    if end:
        relay.end()
    else:
        relay.failed(EngineError("lost"))
    if not flowing:
        await relay.first
        relay.flow(sink, cast("EngineConnection", sink))  # type: ignore[arg-type]
    try:
        await relay.done
    except EngineError as error:
        error.add_note(sink.body.decode("utf-8", "replace"))
        raise
    return sink.body


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """Cut bytes at the given places."""
    places = [0, *sorted(set(at)), len(data)]
    return [data[a:b] for a, b in pairwise(places) if a < b]


def without_usage(events: Sequence[bytes]) -> bytes:
    """A stream as vLLM sends it without `include_usage`: the fingerprint stands beside the finish
    reason.
    """
    return b"".join(answers.without_usage(events))


@pytest.mark.parametrize("events", [TEXT, CHAT], ids=["completions", "chat"])
async def test_split_at_every_byte(events: list[bytes]) -> None:
    """Two reads, cut at each byte in turn: the same bytes, the same usage."""
    data = b"".join(events)
    for at in range(len(data) + 1):
        relay = Relay(wants_usage=False)
        assert await run(cut(data, [at]), relay) == without_usage(events)
        assert relay.usage is not None
        assert relay.usage.prompt_tokens == 9


@given(
    st.sets(st.integers(0, 2000), max_size=40),
    st.booleans(),
    st.integers(0, 5),
    st.sampled_from([TEXT, CHAT]),
)
@settings(deadline=None)
def test_split_and_joined_anyhow(
    places: set[int], wants: bool, late: int, events: list[bytes]
) -> None:
    """Any cuts, any moment at which the client's side begins: nothing lost, doubled or
    reordered.
    """
    data = b"".join(events)

    async def check() -> None:
        got = await run(
            cut(data, [p for p in places if p < len(data)]), Relay(wants_usage=wants), late=late
        )
        assert got == (data if wants else without_usage(events))

    asyncio.run(check())


@given(st.integers(0, 2000), st.booleans())
@settings(deadline=None)
def test_a_stream_cut_off_anywhere_fails(keep: int, end: bool) -> None:
    """A stream without its end mark is a failure wherever it stops; whole events before it are
    passed on.
    """
    data = b"".join(TEXT)
    keep = min(keep, len(data) - len(answers.DONE))

    async def check() -> None:
        with pytest.raises(EngineError) as caught:
            await run(cut(data[:keep], range(0, keep, 37)), Relay(wants_usage=True), end=end)
        whole = data[: data.rfind(sse.END, 0, keep) + 2] if sse.END in data[:keep] else b""
        notes = "".join(getattr(caught.value, "__notes__", []))
        assert notes.encode() == whole

    asyncio.run(check())


@pytest.mark.parametrize("at", range(1, 5))
async def test_an_error_event_at_any_place(at: int) -> None:
    """Before real data it is `first` that fails, with the engine's own status; after it, `done`."""
    events = [*CHAT[:at], answers.error_event("boom", 503), *CHAT[at:]]
    with pytest.raises(EngineRefusedError, match="error event with status 503") as caught:
        await run(events, Relay(wants_usage=False))
    assert caught.value.status == 503
    assert b"".join(caught.value.body.split()) == b"".join(
        answers.error_event("boom", 503)[6:].split()
    )
    with pytest.raises(EngineRefusedError, match="error event with status 503"):
        await run([b"".join(events)], Relay(wants_usage=False))


async def test_text_that_looks_like_structure_passes() -> None:
    """A model that writes end marks, errors or usage in its text changes nothing."""
    nasty = [
        "data: [DONE]\n\n",
        '"choices":[],"usage":{',
        'data: {"error": {',
        '"delta":{"role":"',
        '{"index":0,',
    ]
    events = answers.stream(False, 9, nasty, with_usage=False)
    for pieces in (events, [b"".join(events)]):
        relay = Relay(wants_usage=False)
        assert await run(pieces, relay) == b"".join(events)
        assert relay.fast_path.events == len(events) - 1, "the end mark is no data"


async def test_a_finish_is_held_until_the_next_event() -> None:
    """A finish waits for the usage event, goes as it is before any other event, and not at all
    where nothing follows.
    """
    finish, usage = TEXT[-3], TEXT[-2]
    fields = [
        b'"finish_reason":"length"',
        b'"system_fingerprint":"' + answers.FINGERPRINT.encode() + b'"',
    ]
    data = [b"".join([*TEXT[:-3], finish]), usage, answers.DONE]
    body = await run(data, Relay(wants_usage=False))
    assert all(field in body.split(sse.END)[-3] for field in fields)
    other = answers.piece(False, "c", index=1)
    body = await run([*TEXT[:-2], other, answers.piece(False, "", index=1, finish="stop"), usage,
        answers.DONE],
                     Relay(wants_usage=False))  # fmt: skip
    assert finish + other in body
    assert body.count(b'"system_fingerprint"') == 1, "vLLM puts it into the last event alone"
    with pytest.raises(EngineError) as caught:
        await run(TEXT[:-2], Relay(wants_usage=False))
    assert "".join(caught.value.__notes__).encode() == b"".join(TEXT[:-3])
    assert await run([*TEXT[:-2], answers.DONE], Relay(wants_usage=False)) == b"".join(
        [*TEXT[:-2], answers.DONE]
    )


@pytest.mark.parametrize("usage", [False, True])
async def test_a_choice_that_never_came_is_missed(usage: bool) -> None:
    """A terminated vLLM sends nothing of a choice without a token, then the usage and the mark.
    Neither goes to the client.
    """
    rest = [*([TEXT[-2]] if usage else []), answers.DONE]
    for of_one in ([], TEXT[:-2]):
        with pytest.raises(EngineError, match=r"before the answer's end|without any data"):
            await run([*of_one, *rest], Relay(wants_usage=True, choices=2))
    other = answers.piece(False, "", index=1, finish="stop")
    assert await run([*TEXT[:-2], other, *rest], Relay(wants_usage=True, choices=2)) == b"".join(
        [*TEXT[:-2], other, *rest]
    )


def of_two() -> tuple[list[bytes], list[bytes]]:
    """A stream of two choices, of which the second one ends first, before its usage; and the ends
    of both.
    """
    first, second = [[answers.piece(False, word, index=index) for word in "ab"] for index in (0, 1)]
    ends = [answers.piece(False, "", index=index, finish="stop") for index in (0, 1)]
    return [first[0], *second, ends[1], first[1], ends[0]], ends


async def test_choices_that_end_before_others_wait_for_the_usage() -> None:
    """Each last event gets the fingerprint, and the other choice's text does not wait for them."""
    events, ends = of_two()
    usage = TEXT[-2]
    for pieces in ([*events, usage, answers.DONE], [b"".join([*events, usage, answers.DONE])]):
        relay = Relay(wants_usage=False, choices=2)
        body = await run(pieces, relay)
        shown = [event for event in events if event not in ends] + [
            sse.with_fingerprint(end, usage) for end in ends[::-1]
        ]
        assert body == b"".join([*shown, answers.DONE])
        assert relay.usage is not None
    assert await run(
        [*events, usage, answers.DONE], Relay(wants_usage=True, choices=2)
    ) == b"".join([*events, usage, answers.DONE])


@pytest.mark.parametrize(
    "ending", [[], [answers.DONE], [answers.error_event()]], ids=["eof", "mark", "error"]
)
async def test_a_stream_that_fails_keeps_no_end_of_a_choice(ending: list[bytes]) -> None:
    """A choice that was over when the engine failed is over for the client."""
    events, _ = of_two()
    with pytest.raises(EngineError) as caught:
        await run([*events[:-1], *ending], Relay(wants_usage=False, choices=2))
    sent = "".join(caught.value.__notes__).encode()
    assert sorted(sent.split(sse.END)) == sorted(b"".join(events[:-1]).split(sse.END))


async def test_large_ends_of_choices_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held back of a stream is bounded."""
    monkeypatch.setattr(event_filter, "_MAX_HELD", 100)
    events, _ = of_two()
    body = await run([*events, TEXT[-2], answers.DONE], Relay(wants_usage=False, choices=2))
    assert body.startswith(b"".join(events[:-1]))


async def test_a_client_that_sees_the_usage_gets_no_fingerprint_elsewhere() -> None:
    """One stream of several whose common usage event goes to the client leaves the finish as it
    is.
    """
    relay = Relay(wants_usage=False, wants_done=False, index=0, keeps_usage=True)
    assert await run(TEXT, relay) == b"".join(TEXT[:-2])
    assert relay.filter.usage_event == TEXT[-2]


async def test_an_index_is_put_in() -> None:
    """One stream of several carries its own index in every event, and leaves out the end mark."""
    relay = Relay(wants_usage=False, wants_done=False, index=3)
    body = await run([b"".join(TEXT)], relay)
    assert body == without_usage(TEXT[:-1]).replace(b'[{"index":0,', b'[{"index":3,')


async def test_a_whole_answer_is_handed_over() -> None:
    """What is no stream is collected, with its usage."""
    relay = Relay(wants_usage=False)
    relay.head(200, [(b"content-type", b"application/json")])
    body = answers.whole(False, [1, 2, 3], "x", 5)
    for piece in cut(body, range(0, len(body), 10)):
        relay.data(piece)
    relay.end()
    answer = await relay.first
    assert answer.body == body  # type: ignore[union-attr]
    assert relay.usage is not None
    assert (relay.usage.prompt_tokens, relay.usage.completion_tokens) == (3, 5)


async def test_the_ids_of_a_prompt_are_taken_before_anything_is_searched() -> None:
    """They are kept, the client gets `null`, and what the stream holds of its budget goes back."""
    ids = b"[%b]" % b",".join(b"%d" % one for one in range(100_000))
    role = CHAT[0].replace(b'"choices"', b'"prompt_token_ids":%b,"choices"' % ids)
    relay = Relay(wants_usage=True, takes_ids=True)
    relay.head(200, HEAD)
    relay.data(role)
    assert len(ids) < relay.budget.held < len(ids) + 1000
    sink = Sink()
    relay.data(CHAT[1])
    relay.flow(sink, cast("EngineConnection", sink))  # type: ignore[arg-type]
    assert relay.beginning.prompt_ids == ids
    assert relay.budget.held == 0
    assert b'"prompt_token_ids":null' in sink.body
    assert ids[1:50] not in sink.body


def test_a_stream_that_comes_in_one_read_takes_few_steps() -> None:
    """Its plain events are looked at together: each more of them takes a few steps of Python."""

    def reading(data: bytes) -> Coroutine[None, None, int | None]:
        async def read() -> int | None:
            relay = Relay(wants_usage=False, takes_ids=True)
            sink = Sink()
            relay.head(200, list(HEAD))
            relay.data(data)
            relay.flow(sink, cast("EngineConnection", sink))  # type: ignore[arg-type]
            assert relay.done.done()
            assert len(relay.fast_path.ids) == data.count(b'"token_ids":[')
            return None

        return read()

    role, piece, *_, usage, done = CHAT
    plain = piece.replace(b'"token_ids":null', b'"token_ids":[7]')
    ending = answers.piece(True, "b", finish="stop") + usage + done
    few, many = (steps(reading, role + plain * count + ending) for count in (2, EVENTS + 2))
    assert many - few < 5 * EVENTS


async def test_an_event_has_one_list_of_ids_at_most() -> None:
    """Ids are taken out of it list by list: an event of thousands of lists is no engine's."""
    relay = Relay(wants_usage=False, takes_ids=True)
    lists = b",".join([b'{"token_ids":[1]}'] * 100)
    with pytest.raises(EngineError, match="lists of token ids"):
        await run([TEXT[0], b'data: {"id":"c","choices":[%b]}\n\n' % lists, *TEXT[1:]], relay)


@pytest.mark.parametrize("wants_done", [True, False])
async def test_gaps_are_counted_an_event(wants_done: bool) -> None:
    """Each event but the first is one gap, whether it came alone or with others."""
    relay = Relay(wants_usage=False, wants_done=wants_done)
    await run([TEXT[0], TEXT[1] + TEXT[2], TEXT[3], answers.DONE], relay)
    assert relay.fast_path.events == 4, "the end mark is no data"
    assert sum(relay.fast_path.buckets) == 3


@pytest.mark.parametrize("named", [None, Dialect.RESPONSES])
async def test_crumbs_are_no_answer(named: Dialect | None) -> None:
    """They are not looked at one by one."""
    with pytest.raises(EngineError, match="lines that are almost empty"):
        await run([b": ping\n\n" * 2000], Relay(wants_usage=False, named=named))


async def test_a_stream_may_fail_while_its_request_is_cancelled() -> None:
    """Both in one turn of the event loop: nobody waits for the failure any more."""
    relay, sink = Relay(wants_usage=True), Sink()
    relay.head(200, list(HEAD))
    relay.data(TEXT[0])
    relay.flow(sink, cast("EngineConnection", sink))  # type: ignore[arg-type]
    relay.done.cancel()
    relay.failed(EngineError("lost"))
    assert sink.body == TEXT[0]


def test_what_had_come_while_the_loop_was_held_up_is_not_late() -> None:
    """Callbacks of another socket hold the loop up, and the engine sends meanwhile: its stream goes
    on.

    On the loop that serves, whose clock stands still while it calls back.
    """

    async def scenario() -> bytes:
        loop, clock, sink = asyncio.get_running_loop(), Clock(), Sink()
        relay = Relay(wants_usage=False)
        relay.head(200, list(HEAD))
        relay.data(TEXT[0])
        await relay.first
        relay.flow(sink, cast("EngineConnection", sink))  # type: ignore[arg-type]
        pairs = [socket.socketpair() for _ in range(2)]
        (other, others_client), (ours, engine) = pairs

        left = [TEXT[1], TEXT[2], b"".join(TEXT[3:]) + answers.DONE]

        def send() -> None:  # both are read in the next turn of the loop, ours behind the hold-up
            others_client.send(b"x")
            engine.send(left.pop(0))

        def hold_up() -> None:
            other.recv(1)
            time.sleep(0.4)
            if left:
                send()

        for one in (other, ours):
            one.setblocking(False)
        loop.add_reader(other, hold_up)
        loop.add_reader(ours, lambda: relay.data(ours.recv(1 << 16)))
        try:
            watching = asyncio.ensure_future(relay.watch(clock, 0.2, lambda wait: None))
            await asyncio.sleep(0)
            send()
            await watching
        finally:
            for one in (other, ours):
                loop.remove_reader(one)
            for one in (*pairs[0], *pairs[1]):
                one.close()
        return sink.body

    assert uvloop.run(scenario()).endswith(answers.DONE)


def _with_ids(event: bytes, ids: bytes) -> bytes:
    return event.replace(b'"token_ids":null', b'"token_ids":' + ids)


PLAIN = [
    _with_ids(answers.piece(False, text), b"[%d]" % number) for number, text in enumerate("abc", 20)
]
NOT_SENT = {
    "an error": answers.error_event(),
    "an aborted answer": _with_ids(answers.piece(False, "d", finish="abort"), b"[99]"),
    "the end of the choice, while its usage is awaited": _with_ids(
        answers.piece(False, "d", finish="stop"), b"[99]"
    ),
}


@pytest.mark.parametrize("what", NOT_SENT)
async def test_ids_are_those_of_what_was_sent(what: str) -> None:
    """Ids of what the client has not got are not counted, wherever the reads are cut: another
    engine has to make them.
    """
    data = b"".join([*PLAIN, NOT_SENT[what]])
    for at in range(len(PLAIN[0]), len(data)):
        relay = Relay(wants_usage=False, takes_ids=True)
        with pytest.raises(EngineError) as failed:
            await run(cut(data, [at]), relay, end=False)
        assert len(relay.fast_path.ids) == len(PLAIN)
        assert failed.value.__notes__[0].count("data: ") == len(PLAIN)
        assert relay.fast_path.sent.find(b'"token_ids":[%d]' % relay.fast_path.ids[-1]) > 0
        assert relay.filter.finished == ("end of the choice" in what)
