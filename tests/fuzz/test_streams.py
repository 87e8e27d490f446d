"""The relay against a reference reader: real streams and mutated ones, cut everywhere."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdproxy.wire.api_errors import Dialect
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import recorded_streams
from tests.fuzz.streams import check_named, check_stream

BODIES = recorded_streams()
PIECES = [
    b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n',
    b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"id":"x","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n',
    b'data: {"id":"x","choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n',
    (
        b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"total_tokens":4},'
        b'"system_fingerprint":"f"}\n\n'
    ),
    b'data: {"error":{"message":"no","type":"X","code":400}}\n\n',
    b'data: {"object":"error","message":"no","type":"X","code":500}\n\n',
    b"data: [DONE]\n\n",
    b": alive\n\n",
    b"\n",
    b"data: ",
    b"event: x\n",
    b"\r\n\r\n",
    b"\n\n\n",
    b'{"error"',
    b"[" * 2000,
]

NAMED = [
    b'event: response.created\ndata: {"sequence_number":0}\n\n',
    b'event: response.output_item.added\ndata: {"sequence_number":1}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":2}\n\n',
    b'event: response.output_text.done\ndata: {"text":"a","sequence_number":3}\n\n',
    b'event: response.completed\ndata: {"response":{"usage":null},"sequence_number":4}\n\n',
    b'event: response.failed\ndata: {"sequence_number":5}\n\n',
    b'event: message_start\ndata: {"type":"message_start"}\n\n',
    b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\n',
    b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"}}\n\n',
    b'event: message_delta\ndata: {"delta":{"stop_reason":null}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    b'event: error\ndata: {"type":"error"}\n\n',
    *(
        b"event: ping\ndata: {}\n\n",
        b"data: {}\n\n",
        b": alive\n\n",
        b"event: ",
        b"\r\n",
        b"\n\n\n",
    ),
]


def test_there_are_streams() -> None:
    """Recordings of streams are found, failed ones among them."""
    assert len(BODIES) >= 9


@pytest.mark.parametrize("name", BODIES)
async def test_a_recorded_stream_at_every_cut(name: str) -> None:
    """Cut in two at each byte (every few bytes of a long one), a recorded stream comes out the
    same.
    """
    body = BODIES[name]
    for at in range(0, len(body) + 1, 1 + len(body) // 400):
        await check_stream(body, [at])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join),
    st.lists(st.integers(0, 2000), max_size=8),
)
@example(PIECES[0] + PIECES[7] + PIECES[5], [])
@example(PIECES[0] + PIECES[5] + PIECES[7], [3])
@example(PIECES[0] + PIECES[7] + PIECES[7], [])
@example(PIECES[1] + PIECES[7], [])
@example(b"data: {}", [])
@example(
    PIECES[0] + b": x\n" + PIECES[5] + PIECES[7], [len(PIECES[0]), len(PIECES[0] + PIECES[5]) + 4]
)
@example(
    PIECES[0] + b"\n" + PIECES[5] + PIECES[7], [len(PIECES[0]), len(PIECES[0] + PIECES[5]) + 1]
)
@example(
    PIECES[0] + PIECES[5].replace(b"data: ", b"data:") + PIECES[7],
    [len(PIECES[0]), len(PIECES[0] + PIECES[5]) - 1],
)
def test_made_up_streams(stream: bytes, cuts: list[int]) -> None:
    """Events of every kind in any order, and pieces of none."""
    asyncio.run(check_stream(stream, cuts))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(NAMED), max_size=12).map(b"".join),
    st.lists(st.integers(0, 1500), max_size=8),
    st.sampled_from([Dialect.RESPONSES, Dialect.MESSAGES]),
)
@example(NAMED[2] * 9 + NAMED[4] + NAMED[11], [], Dialect.RESPONSES)
@example(NAMED[2] * 9 + NAMED[4] * 2, [len(NAMED[2])], Dialect.RESPONSES)
@example(NAMED[7] * 9 + NAMED[9] + NAMED[10], [len(NAMED[7])], Dialect.MESSAGES)
def test_streams_of_named_events(stream: bytes, cuts: list[int], named: Dialect) -> None:
    """Events of both APIs in any order, and pieces of none."""
    asyncio.run(check_named(stream, cuts, named))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(BODIES)).map(BODIES.__getitem__).flatmap(mutated),
    st.lists(st.integers(0, 5000), max_size=5),
)
def test_mutated_recordings(stream: bytes, cuts: list[int]) -> None:
    """Recorded streams with bytes changed, doubled, lost and moved."""
    asyncio.run(check_stream(stream, cuts))
