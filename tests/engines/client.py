"""A plain HTTP client for the tests: one request, its whole answer, and how it ended."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# an engine's first request with logprobs takes about 20 s, several at once take longer
TIMEOUT = 240.0


@dataclass
class Answer:
    """An answer: status, headers, all bytes, how it ended (`broken`: the error), and times in
    seconds since the request.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    broken: str = ""
    first_byte: float = 0.0
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def streamed(self) -> bool:
        """Whether this is a server-sent event stream."""
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[str]:
        """The stream's events without `data: `. Incomplete events are included unchanged, so that a
        test sees them.
        """
        parts = self.body.decode().split("\n\n")
        return [part.removeprefix("data: ") for part in parts if part]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The stream's events as JSON, without [DONE]."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        """The first choice's text; of a stream, joined."""
        objects = self.chunks if self.streamed else [self.json]
        choices = [
            choice
            for chunk in objects
            for choice in chunk.get("choices", ())
            if choice["index"] == 0
        ]
        return "".join(_text(choice) for choice in choices)


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


async def ask(
    url: str,
    path: str,
    body: dict[str, Any] | bytes,
    headers: Mapping[str, str] | None = None,
    *,
    timeout: float = TIMEOUT,
    progress: "Progress | None" = None,
) -> Answer:
    """POST and read to the end. A broken connection is part of the answer; after `timeout` seconds
    it raises TimeoutError.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer, started = Answer(), time.monotonic()
    limits = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(
        timeout=limits, connector=aiohttp.TCPConnector(force_close=True)
    ) as session:
        try:
            async with session.post(
                url + path,
                data=data,
                headers={"Content-Type": "application/json", **(headers or {})},
            ) as response:
                answer.status, answer.headers = response.status, dict(response.headers)
                async for data_read in response.content.iter_any():
                    answer.first_byte = answer.first_byte or time.monotonic() - started
                    answer.body += data_read
                    if progress:
                        progress.saw(answer)
        except aiohttp.ClientError as error:
            answer.broken = repr(error)
    answer.seconds = time.monotonic() - started
    return answer


class Progress:
    """Lets a test wait until a stream has sent a number of events."""

    def __init__(self, events: int) -> None:
        self._wanted = events
        self._reached = asyncio.Event()

    def saw(self, answer: Answer) -> None:
        """Called by `ask` after each read."""
        if answer.body.count(b"\n\n") >= self._wanted:
            self._reached.set()

    async def wait(self, timeout: float = 60.0) -> None:
        """Return when the events have arrived."""
        async with asyncio.timeout(timeout):
            await self._reached.wait()
