"""Closed-loop load on OpenAI servers: C clients, each with one open request, on kept connections.
Prints one line of JSON.

Usage: load.py URL [URL ...] --conc C --n N [--stream] [--chat] [--prompt-bytes B] [--rate R]
       load.py --direct P D [--direct P D ...] --conc C --n N --stream

`--direct` calls a prefill and a decode engine without a proxy: the minimum for P and D. `--rate`
starts at most R requests per second, however many clients are free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import uvloop

TEXT = "the quick brown fox jumps over the lazy dog "
REQUEST_TIMEOUT = 120.0
"""Seconds allowed for one request."""
PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


class Tally:
    """Results of all clients of a run. Times are in seconds."""

    def __init__(self) -> None:
        self.ok = self.events = self.pieces = self.reads = 0
        self.first = array("d")
        self.total = array("d")
        self.gaps = array("d")
        self.errors: Counter[str] = Counter()

    def summary(self, wall: float) -> dict[str, Any]:
        """Return the figures. A gap lies between two reads that brought events."""
        times = {"first": self.first, "total": self.total, "gap": self.gaps}
        ranks = {
            f"{name}_{rank}_ms": percentile(values, q)
            for name, values in times.items()
            for rank, q in RANKS.items()
        }
        return {
            "ok": self.ok,
            "errors": dict(self.errors),
            "events": self.events,
            "events_per_read": round(self.events / self.reads, 3) if self.reads else None,
            "events_per_chunk": round(self.events / self.pieces, 3) if self.pieces else None,
            "wall_s": round(wall, 3),
            **ranks,
        }


ENDS = (b"data: [DONE]", b"event: response.completed", b"event: message_stop")
RANKS = {"p50": 0.5, "p99": 0.99}


def percentile(values: Sequence[float], rank: float) -> float | None:
    """Return a percentile of values in seconds as milliseconds; None if there are no values."""
    found = sorted(values)
    return round(1000 * found[min(len(found) - 1, int(rank * len(found)))], 3) if found else None


class Client(asyncio.Protocol):
    """One connection. Counts events by patterns and parses nothing else, since it shares the
    machine with the servers.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.done.set_result(None)
        self.transport: Any = None
        self.closed = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.closed = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.done.done():
            self.done.set_exception(exc or EOFError("closed"))

    def ask(self, request: bytes, began: float) -> asyncio.Future[None]:
        """Send a request; the future is done when its answer is complete."""
        self.began, self.first, self.before = began, 0.0, 0.0
        self.head = self.rest = b""
        self.body = bytearray()
        self.missing = 0
        self.finished = self.failed = False
        self.done = self.loop.create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self.head:
            self.rest += data
            head, mark, data = self.rest.partition(b"\r\n\r\n")
            if not mark:
                return
            self.rest = b""
            self.head = head.lower()
            self.chunked = b"transfer-encoding: chunked" in self.head
            self.streamed = b"text/event-stream" in self.head
            if not self.chunked:
                self.missing = int(self.head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if not self.chunked:
            self.body += data
            self.missing -= len(data)
            if self.missing <= 0:
                self._end()
            return
        if not data:
            return
        seen = self.rest + data  # a pattern may span two reads
        if not self.streamed:
            self.body += data
        elif events := seen.count(b"data: {") + seen.count(b"data: ["):
            self._saw(events, seen)
        if seen.endswith(b"0\r\n\r\n"):
            self._end()
        else:
            self.rest = seen[-6:]

    def _saw(self, events: int, seen: bytes) -> None:
        now = time.perf_counter()
        self.finished = self.finished or any(mark in seen for mark in ENDS)
        if b'data: {"error' in seen:
            self.failed = True
            self.body += seen
        tally = self.tally
        tally.events += events
        tally.pieces += seen.count(b"\r\ndata: ")
        tally.reads += 1
        if self.first:
            tally.gaps.append(now - self.before)
        else:
            self.first = now
        self.before = now

    def _end(self) -> None:
        now = time.perf_counter()
        self.ended = now
        self.first = self.first or now
        if not self.done.done():
            self.done.set_result(None)


class Load:
    """One run: its clients share `n` requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.chat = options.chat or options.route is not None
        self.text = (TEXT * (options.prompt_bytes // len(TEXT) + 1))[: options.prompt_bytes]
        self.numbers = iter(range(options.n))
        self.tally = Tally()
        self.started = 0.0

    def request(self, url: str, number: int, **more: object) -> bytes:
        """Return a request as bytes; its number makes its prompt unique."""
        prompt = f"{number} {self.text}"
        body: dict[str, object] = {"model": "m", "max_tokens": 64, "stream": self.options.stream}
        body |= (
            {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        )
        if self.options.token_ids:
            body["return_token_ids"] = True
        path = self.options.route or ("/v1/chat/completions" if self.chat else "/v1/completions")
        if path == "/v1/responses":
            body["input"], body["max_output_tokens"] = body.pop("messages"), body.pop("max_tokens")
        data = json.dumps(body | more).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: "
            f"application/json\r\n"
        )
        return b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(data), data)

    async def connected(self, client: Client, url: str) -> None:
        """Connect a client if it is not connected."""
        if client.closed:
            parts = urlsplit(url)
            loop = asyncio.get_running_loop()
            await loop.create_connection(
                lambda: client, parts.hostname or "127.0.0.1", parts.port or 80
            )

    async def client(self, url: str, prefill: str | None) -> None:
        """Send requests until all numbers are used. With `prefill`, to that engine first, then to
        `url` with its handle.
        """
        mine, other = Client(self.tally), Client(self.tally)
        for number in self.numbers:
            if self.options.rate:
                await asyncio.sleep(self.started + number / self.options.rate - time.perf_counter())
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT):
                    began = time.perf_counter()
                    more: dict[str, object] = {}
                    if prefill is not None:
                        await self.connected(other, prefill)
                        leg = self.request(
                            prefill,
                            number,
                            max_tokens=1,
                            stream=False,
                            kv_transfer_params=PREFILL_PARAMS,
                        )
                        await other.ask(leg, began)
                        more = {"kv_transfer_params": json.loads(other.body)["kv_transfer_params"]}
                    await self.connected(mine, url)
                    await mine.ask(self.request(url, number, **more), began)
                self._judge(mine)
            except (OSError, EOFError, TimeoutError, ValueError, KeyError) as error:
                self.tally.errors[repr(error)[:100]] += 1
                for each in (mine, other):
                    if each.transport is not None:
                        each.transport.abort()
                        each.closed = True
                mine, other = Client(self.tally), Client(self.tally)

    def _judge(self, client: Client) -> None:
        tally = self.tally
        status = int(client.head.split(b" ", 2)[1])
        good = (
            client.finished and not client.failed
            if self.options.stream
            else b'"usage"' in client.body
        )
        if status == 200 and good:
            tally.ok += 1
            tally.first.append(client.first - client.began)
            tally.total.append(client.ended - client.began)
        else:
            tally.errors[f"{status} {bytes(client.body[:100])!r}"] += 1
        if b"connection: close" in client.head:
            client.transport.close()
            client.closed = True

    async def run(self) -> dict[str, Any]:
        """Run to the end and return the figures."""
        targets = [(url, None) for url in self.options.urls] + [
            (d, p) for p, d in self.options.direct
        ]
        self.started = time.perf_counter()
        await asyncio.gather(
            *(self.client(*targets[n % len(targets)]) for n in range(self.options.conc))
        )
        return self.tally.summary(time.perf_counter() - self.started)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", metavar="URL", nargs="*")
    parser.add_argument("--direct", metavar=("P", "D"), nargs=2, action="append", default=[])
    parser.add_argument("--conc", type=int, default=32, help="clients")
    parser.add_argument("--n", type=int, default=2000, help="requests of all clients together")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--route", help="/v1/responses or /v1/messages in place of a chat")
    parser.add_argument("--token-ids", action="store_true", help="ask for token ids")
    parser.add_argument("--prompt-bytes", type=int, default=512)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="maximum requests per second; 0: no limit"
    )
    options = parser.parse_args()
    if not options.urls and not options.direct:
        parser.error("give a URL, or --direct P D")
    print(json.dumps(uvloop.run(Load(options).run())))


if __name__ == "__main__":
    main()
