"""A cheap replacement for vLLM engines, so that a benchmark measures the proxy. Not for tests: it
checks nothing.

Usage: mock_engine.py PORT [PORT ...] [--chunks N] [--itl SECONDS] [--prefill-seconds SECONDS]

Its answers have the bytes of vLLM 0.32.0 (tests/unit/test_mock_engine.py compares them with
recordings), rendered once. Each port is a separate engine; A-B means all ports from A to B. A
prefill leg gets a NIXL handle, a stream gets N chunks, one every ITL seconds (0: as fast as
possible) and one per write, any other request a whole answer. `GET /_counts` returns what arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httptools
import msgspec
import uvloop

import mock_named

MODEL = "m"
CREATED = 1795219866
FINGERPRINT = "vllm-0.32.0-e7581fe7"
BLOCK = 16
"""Tokens per KV block."""
METRICS = (
    Path(__file__).resolve().parents[1] / "tests" / "sim" / "recordings" / "misc_metrics_D.txt"
)
"""A recorded page: with a real engine a proxy also reads hundreds of lines."""
MOVED = (
    b'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} '
)
COMMON = f"date: {formatdate(usegmt=True)}\r\nserver: uvicorn\r\n".encode()
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n"
    b"transfer-encoding: chunked\r\n\r\n" % COMMON
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class _Params(msgspec.Struct):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_num_tokens: int | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Asked(msgspec.Struct):
    """The fields of a request that change its answer."""

    stream: bool | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    return_token_ids: bool | None = None
    stream_options: _StreamOptions | None = None
    kv_transfer_params: _Params | None = None


_asked = msgspec.json.Decoder(_Asked)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _answer(body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\ncontent-type: %b\r\nvary: Origin\r\n\r\n"
    return head % (COMMON, len(body), content_type) + body


def _event(event: dict[str, Any]) -> bytes:
    data = b"data: %b\n\n" % _json(event)
    return b"%x\r\n%b\r\n" % (len(data), data)


def _prompt_ids(count: int) -> list[int]:
    return list(range(1000, 1000 + count))


def _chunk_of(chat: bool) -> dict[str, Any]:
    name, kind = (
        ("chatcmpl-99c6249855d558d6", "chat.completion.chunk")
        if chat
        else ("cmpl-8b22316710bc81b6", "text_completion")
    )
    return {"id": name, "object": kind, "created": CREATED, "model": MODEL}


@functools.cache
def outputs(chat: bool, chunks: int, ids: bool) -> tuple[bytes, ...]:
    """Return the events that carry a stream's output, as HTTP chunks."""
    found = []
    for index in range(chunks):
        last = index == chunks - 1
        choice: dict[str, Any] = {
            "index": 0,
            **({"delta": {"content": " hello"}} if chat else {"text": " hello"}),
        }
        choice |= {"logprobs": None, "finish_reason": "length" if last else None}
        choice |= {"stop_reason": None} if last or not chat else {}
        choice |= {} if chat else {"prompt_token_ids": None}
        found.append(
            _event(
                _chunk_of(chat)
                | {"choices": [choice | {"token_ids": [2000 + index] if ids else None}]}
            )
        )
    return tuple(found)


@functools.lru_cache(256)
def opening(chat: bool, chunks: int, prompt: int | None) -> bytes:
    """Return a stream's first write: a chat's role, or a completion's first token, with `prompt`
    prompt token ids if not None.
    """
    ids = None if prompt is None else _prompt_ids(prompt)
    if chat:
        role = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return STREAM_HEAD + _event(
            _chunk_of(chat) | {"choices": [role], "prompt_token_ids": ids, "prompt_text": None}
        )
    first = outputs(chat, chunks, ids is not None)[0].partition(b"data: ")[2].rstrip()
    event = json.loads(first)
    event["choices"][0]["prompt_token_ids"] = ids
    return STREAM_HEAD + _event(event)


@functools.lru_cache(256)
def usage(chat: bool, prompt: int, chunks: int) -> bytes:
    """Return a stream's usage event, as an HTTP chunk."""
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + chunks, "completion_tokens": chunks}
    return _event(
        _chunk_of(chat) | {"choices": [], "usage": counts, "system_fingerprint": FINGERPRINT}
    )


def _handle(prefill: str | None, prompt: int, name: str) -> dict[str, Any] | None:
    """Return the handle of a prompt's KV, None without an engine that keeps it."""
    if prefill is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(100, 100 + -(-prompt // BLOCK)))],
        "remote_engine_id": prefill,
        "remote_request_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), 1),
        "remote_num_tokens": prompt,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


@functools.lru_cache(256)
def named(path: bytes, chunks: int, prompt: int, prefill: str | None) -> bytes:
    """Return an answer of Responses or Messages that is not streamed."""
    handle = _handle(prefill, prompt, "chatcmpl-91e491f871e03068-8caf4112")
    return _answer(_json(mock_named.whole(path, chunks, prompt, handle)))


@functools.lru_cache(256)
def whole(chat: bool, chunks: int, prompt: int, ids: bool, prefill: str | None) -> bytes:
    """Return an answer that is not streamed; `prefill` is the id of the engine that keeps the
    prompt's KV.
    """
    prompt_ids = _prompt_ids(prompt) if ids else None
    text = " hello" * chunks
    name = "chatcmpl-91e491f871e03068" if chat else "cmpl-899d00b0959a2d34"
    choice: dict[str, Any] = {"index": 0}
    if chat:
        nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choice["message"] = {"role": "assistant", "content": text, **nothing}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice["token_ids"] = list(range(2000, 2000 + chunks)) if ids else None
    choice |= {} if chat else {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
    choice["routed_experts"] = None
    handle = _handle(prefill, prompt, name + ("-8caf4112" if chat else "-0-9cc849e2"))
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + chunks, "completion_tokens": chunks}
    body = {
        "id": name,
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": MODEL,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": counts | {"prompt_tokens_details": None, "completion_tokens_details": None},
        **(
            {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
            if chat
            else {}
        ),
        "kv_transfer_params": handle,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return _answer(_json(body))


class Engine:
    """The shared state of all connections of one engine."""

    def __init__(
        self, port: int, chunks: int, itl: float, prefill_seconds: float, ranks: int = 1
    ) -> None:
        self.ranks = ranks
        self.name = f"2a59f421-6e63-40bc-8d57-{port:012d}"
        self.chunks = chunks
        self.itl = itl
        self.prefill_seconds = prefill_seconds
        self.counts = {"prefill": 0, "decode": 0, "decode_with_kv": 0, "moved_tokens": 0, "left": 0}
        card = {
            "id": MODEL,
            "object": "model",
            "created": CREATED,
            "owned_by": "vllm",
            "root": MODEL,
            "parent": None,
        }
        models = _answer(
            _json({"object": "list", "data": [card | {"max_model_len": 131072, "permission": []}]})
        )
        self.pages = {
            b"/health": _answer(b""),
            b"/v1/models": models,
            b"/version": _answer(b'{"version":"0.32.0"}'),
        }

    def page(self, path: bytes) -> bytes:
        """Return the answer to a GET."""
        if path == b"/_counts":
            return _answer(_json(self.counts))
        if path == b"/metrics":
            before, after = _metrics(self.ranks)
            page = before + MOVED + b"%d.0" % self.counts["moved_tokens"] + after
            return _answer(page, b"text/plain; version=1.0.0; charset=utf-8")
        return self.pages.get(path) or _answer(b"{}")


@functools.cache
def _metrics(ranks: int) -> tuple[bytes, bytes]:
    page = METRICS.read_bytes().replace(b'"tiny"', b'"m"').partition(b"\n\n# ")
    before, _, after = (b"# " + page[2]).partition(MOVED)
    return _of_ranks(before, ranks), b"\n" + _of_ranks(after.partition(b"\n")[2], ranks)


def _of_ranks(page: bytes, ranks: int) -> bytes:
    """Return a page in which each line of a rank comes once for each."""
    own = b'engine="0"'
    return b"\n".join(
        line.replace(own, b'engine="%d"' % rank)
        for line in page.split(b"\n")
        for rank in range(ranks if own in line else 1)
    )


class Connection(asyncio.Protocol):
    """One connection to a mock engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        self.events: tuple[bytes, ...] = ()
        self.at = 0
        self.tail: list[bytes] = []
        self.timer: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.engine.counts["left"] += 1
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    # -- httptools

    def on_message_begin(self) -> None:
        self.body = b""

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"GET":
            self.transport.write(self.engine.page(self.path))
        elif self.path == b"/tokenize":
            self.transport.write(
                _answer(
                    b'{"count":3,"max_model_len":131072,"tokens":[0,768,588],"token_strs":null}'
                )
            )
        else:
            self.generate(_asked.decode(self.body), b"chat" in self.path)

    # -- generating

    def generate(self, asked: _Asked, chat: bool) -> None:
        """Answer as the prefill or as the decode engine, as the request demands."""
        engine = self.engine
        params = asked.kv_transfer_params or _Params()
        ids = bool(asked.return_token_ids)
        prompt = params.remote_num_tokens or max(8, len(self.body) // 5)
        is_named = self.path in (mock_named.RESPONSES, mock_named.MESSAGES)
        limit = asked.max_tokens or asked.max_output_tokens
        if params.do_remote_decode or (limit == 1 and not asked.stream):
            engine.counts["prefill"] += 1
            answer = (
                named(self.path, 1, prompt, engine.name)
                if is_named
                else whole(chat, 1, prompt, ids, engine.name)
            )
            if engine.prefill_seconds:
                self.timer = self.loop.call_later(engine.prefill_seconds, self.late, answer)
            else:
                self.transport.write(answer)
            return
        engine.counts["decode"] += 1
        if params.do_remote_prefill:
            engine.counts["decode_with_kv"] += 1
            engine.counts["moved_tokens"] += prompt
        if is_named:
            self.generate_named(prompt, stream=bool(asked.stream))
            return
        if not asked.stream:
            self.transport.write(whole(chat, engine.chunks, prompt, ids, None))
            return
        wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self.tail = [usage(chat, prompt, engine.chunks), END] if wants_usage else [END]
        self.events = outputs(chat, engine.chunks, ids)
        self.at = 0 if chat else 1
        self.transport.write(opening(chat, engine.chunks, prompt if ids else None))
        paced = engine.itl and self.at  # a chat's first token follows its role at once
        self.timer = (
            self.loop.call_later(engine.itl, self.step) if paced else self.loop.call_soon(self.step)
        )

    def generate_named(self, prompt: int, *, stream: bool) -> None:
        """Answer as the decode engine of Responses or Messages."""
        chunks = self.engine.chunks
        if not stream:
            self.transport.write(named(self.path, chunks, prompt, None))
            return
        self.tail = [mock_named.ending(self.path, chunks, prompt)]
        self.events, self.at = mock_named.outputs(self.path, chunks), 0
        self.transport.write(STREAM_HEAD + mock_named.opening(self.path, prompt))
        self.timer = self.loop.call_soon(self.step)

    def late(self, answer: bytes) -> None:
        self.timer = None
        self.transport.write(answer)

    def step(self) -> None:
        """Write the next event. Each is written in a separate loop iteration, so that each is a
        separate write.
        """
        if self.at < len(self.events):
            self.transport.write(self.events[self.at])
            self.at += 1
            more = self.at < len(self.events) and self.engine.itl
            self.timer = (
                self.loop.call_later(self.engine.itl, self.step)
                if more
                else self.loop.call_soon(self.step)
            )
        else:
            self.transport.write(self.tail.pop(0))
            self.timer = self.loop.call_soon(self.step) if self.tail else None


def _ports(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


async def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ports", metavar="PORT", type=_ports, nargs="+")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--itl", type=float, default=0.0, help="seconds between two chunks")
    parser.add_argument(
        "--prefill-seconds", type=float, default=0.0, help="duration of a prefill leg"
    )
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks, in /metrics")
    options = parser.parse_args()
    loop = asyncio.get_running_loop()
    for port in (port for ports in options.ports for port in ports):
        engine = Engine(port, options.chunks, options.itl, options.prefill_seconds, options.ranks)
        await loop.create_server(
            functools.partial(Connection, engine), "127.0.0.1", port, backlog=4096
        )
    await loop.create_future()


if __name__ == "__main__":
    uvloop.run(main())
