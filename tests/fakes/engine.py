"""A scripted engine on a free loopback port: real sockets, answers in vLLM's shape, and every misfortune on demand.

A test gives it scripts, one a request; where there are none left it behaves as its role does. A script is an async function
of a `Reply`. Requests with `max_tokens: 0` (handles given back) never use up a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.fakes import answers
from tests.fakes.books import Books
from tests.fakes.request import GENERATING, Request

_ids = itertools.count(1)


class Reply:
    """A script's hand on one request's answer."""

    def __init__(self, engine: FakeEngine, request: Request, connection: _Connection) -> None:
        self.engine = engine
        self.request = request
        self._connection = connection
        self._chunked = False

    async def raw(self, data: bytes) -> None:
        """Write bytes as they are, and wait until the socket takes more."""
        self._connection.transport.write(data)
        await self._connection.writable.wait()

    async def whole(self, body: bytes, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> None:
        """A complete answer with a length."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        kind = (
            "" if any(name.lower() == "content-type" for name, _ in headers) else "content-type: application/json\r\n"
        )
        head = f"HTTP/1.1 {status} X\r\nserver: uvicorn\r\n{kind}content-length: {len(body)}\r\n{lines}\r\n"
        await self.raw(head.encode() + body)

    async def start(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        """The head of a stream."""
        self._chunked = True
        await self.raw(
            f"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )

    async def piece(self, data: bytes) -> None:
        """One HTTP chunk."""
        if self.request.kv is not None:
            self.engine.loaded(self.request)
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def pieces(self, *data: bytes) -> None:
        """Several chunks, each in a TCP write of its own."""
        for one in data:
            await self.piece(one)

    async def finish(self) -> None:
        """The end of a chunked body."""
        await self.raw(b"0\r\n\r\n")

    def eof(self) -> None:
        """Close the connection in good order, whatever was sent."""
        self._connection.over()
        self._connection.transport.close()

    def reset(self) -> None:
        """Close it with an RST."""
        self._connection.over()
        with socket.socket(fileno=os.dup(self._connection.transport.get_extra_info("socket").fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.transport.abort()

    async def stall(self) -> None:
        """Say nothing more until the client leaves."""
        await asyncio.Event().wait()


Script = Callable[[Reply], Awaitable[None]]


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self.number = next(_ids)
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._engine.connections.add(self)
        self._engine.connected += 1

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark or self._request is not None:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = int(next((value for name, value in headers if name.lower() == "content-length"), "0"))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, path, _ = first.split(" ", 2)
        self._request = Request(method, path, headers, rest[:length], self.number)
        self._task = asyncio.ensure_future(self._answer(self._request))

    async def _answer(self, request: Request) -> None:
        try:
            await self._engine.answer(Reply(self._engine, request, self))
        except Exception as error:
            self._engine.crashes.append(f"{request.path}: {error!r}")
            self.transport.abort()
        self.over()

    def over(self) -> None:
        if self._request is not None:
            self._request.over = True
            self._request = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connections.discard(self)
        self.writable.set()
        if self._request is not None:
            self._request.left_at = time.monotonic()
            self._request.left.set()
            self._engine.aborted(self._request)
        if self._task is not None:
            self._task.cancel()


class FakeEngine:
    """One engine. `books` are shared by all engines of a test; the rest may be changed while it runs."""

    def __init__(self, role: str, books: Books) -> None:
        self.role = role
        self.books = books
        self.requests: list[Request] = []
        self.releases: list[Request] = []
        self.connections: set[_Connection] = set()
        self.connected = 0
        self.crashes: list[str] = []
        self.scripts: deque[Script] = deque()
        self.default: Script = prefill if role == "prefill" else decode
        self.on_release: Script | None = None
        self.admin: dict[str, Script] = {}
        self.models = ["tiny"]
        self.version = "0.32.0"
        self.block_size = 16
        self.started = 1795219717.25
        self.template = "<|{role}|>"
        self.words = answers.WORDS
        self.moves_kv = True
        self.by_source = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.port = 0
        self._server: asyncio.Server | None = None
        self._loaded: set[int] = set()
        self._arrival = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        """Take connections, on the port it had before if it had one."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener)

    def refuse(self) -> None:
        """Refuse new connections and drop the idle ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            if connection._request is None:
                connection.transport.abort()

    def stop(self) -> None:
        """Be gone: as `refuse`, and every connection drops."""
        self.refuse()
        for connection in list(self.connections):
            connection.transport.abort()

    def script(self, *scripts: Script) -> None:
        """Answer the next requests so, one after the other."""
        self.scripts.extend(scripts)

    async def asked(self, count: int = 1) -> Request:
        """Wait until so many generating requests have come; return the last of them."""
        async with asyncio.timeout(5):
            while len(self.requests) < count:
                self._arrival.clear()
                await self._arrival.wait()
        return self.requests[count - 1]

    async def given_back(self, count: int = 1) -> Request:
        """Wait until so many handles have been given back here; return the last such request."""
        async with asyncio.timeout(5):
            while len(self.releases) < count:
                self._arrival.clear()
                await self._arrival.wait()
        return self.releases[count - 1]

    # -- what the connections call

    async def answer(self, reply: Reply) -> None:
        """Answer one request."""
        request = reply.request
        if request.path in self.admin:
            await self.admin[request.path](reply)
        elif request.path not in GENERATING:
            await self._about(reply)
        elif request.body[:1] == b"{" and request.json.get("max_tokens") == 0:
            self.releases.append(request)
            self._arrival.set()
            await (self.on_release or release)(reply)
        else:
            self.requests.append(request)
            self._arrival.set()
            if (kv := request.kv) is not None and self.role != "prefill":
                self.books.note(kv, "asked")
            await (self.scripts.popleft() if self.scripts else self.default)(reply)

    def loaded(self, request: Request) -> None:
        """The request's handle has been loaded; counted once."""
        if self.role == "prefill" or id(request) in self._loaded:
            return
        self._loaded.add(id(request))
        assert request.kv is not None
        self.books.note(request.kv, "loaded")
        source = "external_kv_transfer" if self.moves_kv else "local_compute"
        self.by_source[source] += len(self.ids(request))

    def aborted(self, request: Request) -> None:
        """The client left a request that this engine had."""
        if request.path not in GENERATING or self.role == "prefill" or request in self.releases:
            return
        if request.kv is not None and id(request) not in self._loaded:
            self.books.note(request.kv, "aborted")

    def ids(self, request: Request) -> list[int]:
        """The prompt's token ids: those in the handle, else those of a tokenizer that makes a token a byte."""
        body = request.json
        if request.kv is not None and (given := request.kv.get("prompt_token_ids")) is not None:
            return list(given)
        return self.tokenize(body)

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The token ids of a prompt or a chat."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return list(prompt)
        if "messages" in body:
            texts = (self.template.format(role=m.get("role")) + str(m.get("content")) for m in body["messages"])
            prompt = "".join(texts)
        return [0, *str(prompt).encode()]

    async def _about(self, reply: Reply) -> None:
        """Answer what is not a generating request."""
        match reply.request.path:
            case "/health":
                await reply.whole(b"", headers=[("content-type", "text/plain")])
            case "/v1/models":
                cards = [{"id": name, "object": "model", "root": "./model", "parent": None} for name in self.models]
                await reply.whole(answers.compact({"object": "list", "data": cards}))
            case "/version":
                await reply.whole(answers.compact({"version": self.version}))
            case "/metrics":
                await reply.whole(self._metrics().encode(), headers=[("content-type", "text/plain; version=1.0.0")])
            case "/tokenize":
                ids = self.tokenize(reply.request.json)
                await reply.whole(answers.compact({"count": len(ids), "max_model_len": 2048, "tokens": ids}))
            case _:
                await reply.whole(b'{"detail":"Not Found"}', 404)

    def _metrics(self) -> str:
        lines = [
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self.started!r}",
            'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0',
            f'vllm:cache_config_info{{block_size="{self.block_size}",engine="0"}} 1.0',
        ]
        for source, count in self.by_source.items():
            lines.append(
                f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="{source}"}} {count}.0'
            )
        return "\n".join(lines) + "\n"


async def prefill(reply: Reply) -> None:
    """A prefill engine: one token, a fresh handle, the prompt's ids."""
    engine, request = reply.engine, reply.request
    body = request.json
    ids = engine.ids(request)
    kv: dict[str, Any] | None = None
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        kv = handle(engine, ids)
        engine.books.given(kv)
    asked = bool(body.get("return_token_ids"))
    await reply.whole(answers.whole(request.chat, ids, engine.words[0], 1, ident=request.ident, ids=asked, kv=kv))


def handle(engine: FakeEngine, ids: Sequence[int]) -> dict[str, Any]:
    """A handle as NIXL makes it, unlike any other."""
    number = next(_ids)
    blocks = -(-len(ids) // engine.block_size)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(number, number + blocks))],
        "remote_engine_id": f"engine-{engine.port}",
        "remote_request_id": f"cmpl-{number}-0-9cc849e2",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(ids),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


async def decode(reply: Reply) -> None:
    """A decode or aggregated engine: loads the handle if there is one, and answers whole or as a stream."""
    engine, request = reply.engine, reply.request
    body = request.json
    if body.get("model") not in (None, *engine.models):
        await reply.whole(answers.MODEL_404, 404)
        return
    if not isinstance(body.get("max_tokens"), int | None) or isinstance(body.get("messages"), str):
        await reply.whole(answers.SCHEMA_400, 400)
        return
    count = min(len(engine.words), body.get("max_completion_tokens") or body.get("max_tokens") or 4)
    words = engine.words[:count]
    ids = engine.ids(request)
    if not body.get("stream"):
        if request.kv is not None:
            engine.loaded(request)
        await reply.whole(answers.whole(request.chat, ids, "".join(words), count, ident=request.ident))
        return
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    await reply.start()
    await reply.pieces(*answers.stream(request.chat, len(ids), words, with_usage=with_usage, ident=request.ident))
    await reply.finish()


async def release(reply: Reply) -> None:
    """The handler's refusal of `max_tokens: 0`, which gives the handle back."""
    if (kv := reply.request.kv) is not None:
        reply.engine.books.note(kv, "released")
    with contextlib.suppress(ConnectionError):
        await reply.whole(answers.MAX_TOKENS_0, 400)
