"""A cheap stand-in for one vLLM engine, so that in a benchmark the proxy is what costs. Not for tests: it checks nothing.

Usage: mock_engine.py PORT [--chunks N] [--itl SECONDS]

A prefill leg gets a NIXL handle, a stream gets N chunks, one every ITL seconds (0: as fast as it can), anything else a whole
answer. `GET /_counts` says what came: prefills, decodes, decodes with a handle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import uvloop

CARD = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm", "root": "m", "parent": None}
METRICS = (
    b"process_start_time_seconds 1.0\n"
    b'vllm:cache_config_info{block_size="16"} 1.0\n'
    b'vllm:num_requests_running{engine="0"} 0.0\n'
)


def answer(body: bytes, content_type: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (content_type, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """What all connections of one engine share."""

    def __init__(self, port: int, chunks: int, itl: float) -> None:
        self.name = f"engine-{port}"
        self.chunks = chunks
        self.itl = itl
        self.counts = {"prefill": 0, "decode": 0, "decode_with_kv": 0}
        self.pages = {
            "/_counts": lambda: json.dumps(self.counts).encode(),
            "/v1/models": lambda: json.dumps({"object": "list", "data": [CARD]}).encode(),
            "/version": lambda: b'{"version":"0.32.0"}',
            "/metrics": lambda: METRICS,
        }

    def prefill(self, chat: bool, size: int) -> bytes:
        ids = list(range(max(8, size // 5)))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": "t"}} if chat else {"text": "t", "prompt_token_ids": ids}
        return json.dumps(
            {
                "id": "cmpl-p",
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1},
                "prompt_token_ids": ids if chat else None,
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "remote_block_ids": [list(range(64))],
                    "remote_engine_id": self.name,
                    "remote_request_id": "cmpl-p-0-12345678",
                    "remote_host": "127.0.0.1",
                    "remote_port": 5600,
                    "tp_size": 1,
                },
            }
        ).encode()

    def event(self, chat: bool, index: int) -> bytes:
        last = index == self.chunks - 1
        choice: dict[str, Any] = {"index": 0, **({"delta": {"content": " hello"}} if chat else {"text": " hello"})}
        choice |= {"logprobs": None, "finish_reason": "stop" if last else None, "token_ids": None}
        event = {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1760000000,
            "model": "m",
            "choices": [choice],
        }
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


class Connection(asyncio.Protocol):
    """One connection to the mock."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffer = bytearray()
        self.stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.stream is not None:
            self.stream.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = bytes(self.buffer[end + 4 : end + 4 + length])
            del self.buffer[: end + 4 + length]
            method, path, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
            self.handle(method, path.decode(), body)

    def handle(self, method: bytes, path: str, body: bytes) -> None:
        engine = self.engine
        if method == b"get":
            self.transport.write(answer(engine.pages.get(path, lambda: b"{}")()))
            return
        request = json.loads(body)
        chat = "chat" in path
        params = request.get("kv_transfer_params") or {}
        if path == "/tokenize":
            self.transport.write(answer(b'{"tokens":[1,2,3,4,5,6,7,8]}'))
        elif params.get("do_remote_decode"):
            engine.counts["prefill"] += 1
            self.transport.write(answer(engine.prefill(chat, len(body))))
        else:
            engine.counts["decode"] += 1
            engine.counts["decode_with_kv"] += bool(params.get("do_remote_prefill"))
            if request.get("stream"):
                self.stream = asyncio.ensure_future(self.send_stream(chat))
            else:
                usage = {"prompt_tokens": len(params.get("prompt_token_ids") or ()), "completion_tokens": engine.chunks}
                text = "hello " * engine.chunks
                choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                whole = {"id": "cmpl-d", "model": "m", "choices": [{"index": 0, **choice}], "usage": usage}
                self.transport.write(answer(json.dumps(whole).encode()))

    async def send_stream(self, chat: bool) -> None:
        write = self.transport.write
        write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for index in range(self.engine.chunks):
            write(chunk(self.engine.event(chat, index)))
            await asyncio.sleep(self.engine.itl)
        write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--itl", type=float, default=0.0)
    options = parser.parse_args()
    engine = Engine(options.port, options.chunks, options.itl)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", options.port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
