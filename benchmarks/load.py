"""Closed-loop load on one OpenAI server: raw asyncio streams, keep-alive. Prints one line of JSON.

Usage: load.py URL --conc C --n N [--stream] [--chat] [--prompt-bytes B]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from urllib.parse import urlsplit

import uvloop


class Load:
    """One run: `conc` clients share `n` requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        url = urlsplit(options.url)
        self.host, self.port = url.hostname, url.port
        self.options = options
        self.text = ("the quick brown fox jumps over the lazy dog " * (options.prompt_bytes // 40 + 2))[
            : options.prompt_bytes
        ]
        self.path = "/v1/chat/completions" if options.chat else "/v1/completions"
        self.numbers = iter(range(options.n))
        self.ok = self.chunks = 0
        self.first: list[float] = []
        self.errors: Counter[str] = Counter()

    def request(self, number: int) -> bytes:
        prompt = f"{number} {self.text}"
        content = {"messages": [{"role": "user", "content": prompt}]} if self.options.chat else {"prompt": prompt}
        body = json.dumps({"model": "m", "max_tokens": 64, "stream": self.options.stream, **content}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        started = time.perf_counter()
        writer.write(self.request(number))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        last = b""
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readline(), 16):
                last = (await reader.readexactly(size + 2))[:-2]
                self.chunks += last.count(b"data:")
                if number >= 0:
                    self.first.append(time.perf_counter() - started)
                    number = -1
            await reader.readline()
        else:
            last = await reader.readexactly(int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]))
            self.first.append(time.perf_counter() - started)
        if status == 200 and (b"[DONE]" in last or not self.options.stream):
            self.ok += 1
        else:
            self.errors[f"{status} {last[:100]!r}"] += 1
        return b"connection: close" not in head

    async def client(self) -> None:
        reader = writer = None
        for number in self.numbers:
            try:
                if reader is None or writer is None:
                    reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
                async with asyncio.timeout(120):
                    keep = await self.one(reader, writer, number)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self.errors[repr(error)[:100]] += 1
                keep = False
            if not keep and writer is not None:
                writer.close()
                reader = writer = None

    async def run(self) -> dict[str, object]:
        started = time.perf_counter()
        await asyncio.gather(*(self.client() for _ in range(self.options.conc)))
        wall = time.perf_counter() - started
        first = sorted(self.first)
        return {
            "ok": self.ok,
            "errors": dict(self.errors),
            "chunks": self.chunks,
            "wall_s": round(wall, 2),
            "first_p50_ms": round(1000 * first[len(first) // 2], 2) if first else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--conc", type=int, default=32)
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--prompt-bytes", type=int, default=512)
    print(json.dumps(uvloop.run(Load(parser.parse_args()).run())))


if __name__ == "__main__":
    main()
