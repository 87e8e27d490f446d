"""The benchmarks' mock engine sends the bytes of recorded engines, except for ids, times, counts
and texts.
"""

import asyncio
import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.sim.recordings.reading import Sent, read

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "mock_engine.py"


def mock():
    if str(PATH.parent) not in sys.path:
        sys.path.append(str(PATH.parent))  # it imports a module beside it
    return importlib.import_module("mock_engine")


MASKED = [
    (rb'"id":"(cmpl|chatcmpl)-[0-9a-f]{16}"', rb'"id":"\1-ID"'),
    (
        rb'"remote_request_id":"(cmpl|chatcmpl)-[0-9a-f]{16}-(0-)?[0-9a-f]{8}"',
        rb'"remote_request_id":"\1-\2ID"',
    ),
    (
        rb'"remote_engine_id":"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"',
        rb'"remote_engine_id":"ID"',
    ),
    (
        (
            rb'"(created|prompt_tokens|total_tokens|remote_num_tokens|'
            rb'remote_prefill_cached_tokens)":'
            rb"\d+"
        ),
        rb'"\1":0',
    ),
    (rb"vllm-0.32.0-[0-9a-f]{8}", b"vllm-0.32.0-ID"),
    (rb'"model":"\w+"', rb'"model":"m"'),
    (rb'"(text|content)":"[^"]+"', rb'"\1":"w"'),
    (rb"\[[\d,]+\]", rb"[0]"),
]


def masked(body):
    for pattern, instead in MASKED:
        body = re.sub(pattern, instead, body)
    return body


def head(data):
    return re.sub(rb"(content-length|date): [^\r]+", rb"\1: ", data)


async def answer_of(sent, chunks):
    """Return the head of the mock engine's answer, and the body without its chunk framing."""
    engine = mock().Engine(8100, chunks, 0.0, 0.0)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: mock().Connection(engine), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent.raw)
        start = await reader.readuntil(b"\r\n\r\n")
        if (length := re.search(rb"content-length: (\d+)", start)) is not None:
            body = await reader.readexactly(int(length[1]))
        else:
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
        writer.close()
    return start, body


def recorded_head(seen):
    lines = [
        seen.line,
        *(f"{name}: {value}" for name, value in seen.headers.items() if name != "connection"),
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("pd01_P_completion_nonstream", 64),
        ("pd02_D_completion_nonstream", 8),
        ("pd03_P_completion_return_token_ids", 64),
        ("pd04_D_completion_stream", 4),
        ("pd07_P_chat_nonstream", 64),
        ("pd08_D_chat_nonstream", 8),
        ("pd10_D_chat_stream", 4),
        ("agg_chat_return_token_ids", 24),
    ],
)
async def test_the_mock_engine_answers_like_recorded_ones(name, chunks):
    exchange = read(name)
    assert exchange.sent is not None
    assert exchange.answer is not None
    start, body = await answer_of(exchange.sent, chunks)
    assert masked(body) == masked(exchange.answer.body)
    assert head(start) == head(recorded_head(exchange.answer))


@pytest.mark.parametrize("name", ["pd04_D_completion_stream", "pd10_D_chat_stream"])
async def test_token_ids_are_in_the_stream_if_asked_for_and_usage_is_not(name):
    sent = read(name).sent
    asked = Sent(sent.method, sent.path, sent.headers).saying(
        sent.json | {"return_token_ids": True, "stream_options": None}
    )
    _, body = await answer_of(asked, 4)
    assert re.findall(rb'"token_ids":(\S+?)\}', body) == [
        b"[2000]",
        b"[2001]",
        b"[2002]",
        b"[2003]",
    ]
    assert re.search(rb'"prompt_token_ids":\[1000,1001', body)
    assert b'"usage"' not in body
    assert body.endswith(b"data: [DONE]\n\n")
