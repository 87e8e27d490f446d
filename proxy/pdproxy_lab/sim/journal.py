"""Records the requests that an engine received, and whether their clients left; tests wait for the
next one.

Bounded in memory. Generating requests, releases of handles and all others are in separate lists.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

RELEASING = ("/v1/completions", "/v1/chat/completions")
"""The routes on which a request without any token releases a handle."""
GENERATING = (
    *RELEASING,
    "/v1/responses",
    "/v1/messages",
    "/cohere/v2/chat",
    "/inference/v1/generate",
)
_SHOWN = 120
"""Bytes at the end of a body that can't be used, which are shown."""


@dataclass(eq=False)
class Request:
    """What an engine received. `left` is set when the client closed the connection before the
    answer was over.
    """

    method: str
    path: str
    headers: list[tuple[str, str]]
    """Names in lower case."""
    body: bytes
    connection: int
    """The connection's number on this engine, from 1."""
    arrived: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    left_at: float | None = None
    over: bool = False
    """The whole answer was sent, or the engine itself ended it."""
    json: dict[str, Any] = field(init=False)
    """The body as JSON; empty if it is not an object."""
    defect: str | None = field(init=False, default=None)
    """What is wrong with the body, with its end: it is announced as JSON and is none, or its
    `kv_transfer_params` are empty.
    """

    def __post_init__(self) -> None:
        """Read the body."""
        try:
            found = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError) as error:
            found = {}
            if "json" in (self.header("content-type") or ""):
                self._note(f"no JSON ({error})")
        self.json = found if isinstance(found, dict) else {}
        if self.generating and self.json.get("kv_transfer_params") == {}:
            self._note("empty kv_transfer_params")

    def _note(self, what: str) -> None:
        self.defect = f"{self.method} {self.path}: {what}: ...{self.body[-_SHOWN:]!r}"

    @property
    def generating(self) -> bool:
        """Whether it is for one of the generating routes."""
        return self.method == "POST" and self.path in GENERATING

    @property
    def release(self) -> bool:
        """Whether it only releases a handle."""
        return self.generating and self.path in RELEASING and self.json.get("max_tokens") == 0

    @property
    def chat(self) -> bool:
        """Whether it is for the chat route."""
        return self.path == GENERATING[1]

    @property
    def stream(self) -> bool:
        """Whether it asks for a stream."""
        return self.path in GENERATING and bool(self.json.get("stream"))

    @property
    def usage_at_end(self) -> bool:
        """Whether it asks for a usage event at the end of its stream."""
        options = self.json.get("stream_options")
        return self.stream and isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def kv(self) -> dict[str, Any] | None:
        """The `kv_transfer_params`, None if there are none."""
        found = self.json.get("kv_transfer_params")
        return found if isinstance(found, dict) else None

    @property
    def wants_handle(self) -> bool:
        """Whether its answer has a handle, or P's first token."""
        kv = self.kv or {}
        return (bool(kv.get("do_remote_decode")) or "ret_first_tok" in kv) and not self.stream

    @property
    def ident(self) -> str:
        """The request's id, as vLLM takes it from the header."""
        return self.header("x-request-id") or "none"

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key == name.lower()), None)


class _Log:
    def __init__(self, limit: int) -> None:
        self.kept: deque[Request] = deque(maxlen=limit)
        self.total = 0
        self._arrival = asyncio.Event()

    def note(self, request: Request) -> None:
        self.kept.append(request)
        self.total += 1
        self._arrival.set()

    async def reached(self, count: int, timeout: float) -> Request:
        async with asyncio.timeout(timeout):
            while self.total < count:
                self._arrival.clear()
                await self._arrival.wait()
        return self.kept[count - 1 - (self.total - len(self.kept))]


class Journal:
    """The requests that an engine received, the last `limit` of each sort."""

    def __init__(self, limit: int = 1000) -> None:
        self._generating, self._releases, self._others = (_Log(limit) for _ in range(3))

    def note(self, request: Request) -> None:
        """Record a request."""
        if not request.generating:
            self._others.note(request)
        elif request.release:
            self._releases.note(request)
        else:
            self._generating.note(request)

    @property
    def requests(self) -> deque[Request]:
        """Generating requests."""
        return self._generating.kept

    @property
    def releases(self) -> deque[Request]:
        """Generating requests with `max_tokens: 0`: they release handles."""
        return self._releases.kept

    @property
    def others(self) -> deque[Request]:
        """All other requests."""
        return self._others.kept

    async def received(self, count: int = 1, timeout: float = 5.0) -> Request:
        """Wait for the `count`-th generating request; return it.

        Raises:
            TimeoutError: it did not come within `timeout` seconds.
        """
        return await self._generating.reached(count, timeout)

    async def released(self, count: int = 1, timeout: float = 5.0) -> Request:
        """Wait for the `count`-th request that releases a handle; return it.

        Raises:
            TimeoutError: it did not come within `timeout` seconds.
        """
        return await self._releases.reached(count, timeout)
