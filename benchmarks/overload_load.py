"""The clients of benchmarks/overload.py: requests that are sent when they are due, and what becomes
of them. On any loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from urllib.parse import urlsplit

from tests.chaos.answers import Answer, MalformedError, read_answer

ALONE = 5
"""Requests of each shape that are sent one by one."""
WITHIN = 2.0
"""Times the time of an unloaded answer within which an answer is good."""
KEPT = 3.0
"""Seconds for which an idle connection is used again."""
WORDS = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Shape:
    """What a request asks for. `lines`: the length of a prompt; `prompts`: how many, more than one
    as a list.
    """

    lines: int = 20
    tokens: int = 64
    stream: bool = False
    prompts: int = 1

    def body(self, model: str, number: int) -> bytes:
        """Return a request's body. Its prompt is no other's."""
        texts = [f"{number}.{place} {WORDS * self.lines}" for place in range(self.prompts)]
        fields = {
            "model": model,
            "prompt": texts if self.prompts > 1 else texts[0],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": self.stream,
        }
        return json.dumps(fields).encode()


def mixed(tokens: int) -> tuple[Shape, ...]:
    """Return shapes of short and long requests, streams and a list."""
    return (
        Shape(5, max(tokens // 4, 1)),
        Shape(20, tokens),
        Shape(20, tokens, stream=True),
        Shape(60, max(tokens // 2, 1)),
        Shape(10, max(tokens // 2, 1), prompts=2),
    )


@dataclass
class Tally:
    """What became of the requests of one load. Times in seconds.

    `begin`, `end`: the times between which good answers are counted. Before, the first ones are
    still made; those that come behind the load were made without it.
    """

    begin: float = -math.inf
    end: float = math.inf
    good: Counter[str] = field(default_factory=Counter)
    outside: int = 0
    """Good answers before and behind."""
    late: int = 0
    """Whole answers that came after their deadline."""
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    refusal_times: list[float] = field(default_factory=list)
    most_over: float = 0.0
    """How long after its deadline the last of all answers came, refusals too."""

    @property
    def goodput(self) -> float:
        """Good answers per second."""
        return self.good.total() / (self.end - self.begin)


class Connections:
    """Kept connections to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._at = parts.hostname or "127.0.0.1", parts.port or 80
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        """With the time of their last answer: a server closes those that nobody uses for 5 s."""

    async def post(self, body: bytes, headers: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        reader, writer = self._kept() or await asyncio.open_connection(*self._at)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            f"{headers}\r\n"
        )
        answer = Answer()
        try:
            writer.write(head.encode() + body)
            await read_answer(reader, answer)
        except BaseException:
            writer.close()
            raise
        if answer.closes:
            writer.close()
        else:
            self._idle.append((asyncio.get_running_loop().time(), reader, writer))
        return answer.status, bytes(answer.body)

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if asyncio.get_running_loop().time() - since < KEPT:
                return reader, writer
            writer.close()
        return None

    def close(self) -> None:
        """Close all that are idle."""
        for _, _, writer in self._idle:
            writer.close()


class Load:
    """Sends requests, and counts what becomes of them. `asks`: whether clients tell the proxy how
    long they wait.
    """

    def __init__(
        self,
        url: str,
        keys: tuple[str, str],
        model: str,
        shapes: tuple[Shape, ...],
        *,
        asks: bool = True,
        seed: int = 1,
    ) -> None:
        self.connections = Connections(url)
        self._keys = keys
        self._model, self._shapes, self._asks = model, shapes, asks
        self._chance = random.Random(seed)
        self._count = 0
        self.limits: dict[Shape, float] = {}
        """Seconds within which an answer is good."""

    async def alone(self) -> float:
        """Measure the median time of an answer without load, for each shape; return their mean."""
        loop, found = asyncio.get_running_loop(), {}
        for shape in self._shapes:
            times = []
            for number in range(ALONE):
                began = loop.time()
                status, body = await self._ask(shape, self._keys[number % 2], 600.0)
                if status != 200:
                    raise SystemExit(f"a request without load got {status}: {body[:300]!r}")
                times.append(loop.time() - began)
            found[shape] = median(times[1:])
        self.limits = {shape: WITHIN * seconds for shape, seconds in found.items()}
        return sum(found.values()) / len(found)

    async def run(self, rate: float, seconds: float) -> Tally:
        """Send `rate` requests per second, half of them with each key."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        due, end = loop.time(), loop.time() + seconds
        tally = Tally(due + min(max(self.limits.values()) / WITHIN, seconds / 2), end)
        number = 0
        while due < end:
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            shape = self._chance.choice(self._shapes)
            task = asyncio.create_task(self._one(shape, "ab"[number % 2], due, tally))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
            due += self._chance.expovariate(rate)
        if tasks:
            await asyncio.wait(tasks, timeout=max(self.limits.values()) + 60)
        return tally

    async def _one(self, shape: Shape, tenant: str, due: float, tally: Tally) -> None:
        limit = self.limits[shape]
        try:
            status, body = await self._ask(
                shape, self._keys["ab".index(tenant)], limit if self._asks else None
            )
        except (OSError, EOFError, ValueError, MalformedError) as error:
            tally.failed[type(error).__name__] += 1
            return
        took = asyncio.get_running_loop().time() - due
        tally.most_over = max(tally.most_over, took - limit)
        if status == 200 and b'"error":' not in body:
            if took > limit:
                tally.late += 1
            elif tally.begin <= due + took <= tally.end:
                tally.good[tenant] += 1
            else:
                tally.outside += 1
            return
        reason = "504" if status in (200, 504) else json.loads(body)["error"].get("reason", status)
        tally.refused[str(reason)] += 1
        tally.refusal_times.append(took)

    async def _ask(self, shape: Shape, key: str, limit: float | None) -> tuple[int, bytes]:
        self._count += 1
        headers = "content-type: application/json\r\n"
        if limit is not None:
            headers += f"x-request-timeout: {limit:.3f}\r\n"
        if key:
            headers += f"authorization: Bearer {key}\r\n"
        return await self.connections.post(shape.body(self._model, self._count), headers)
