"""What an engine received."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

GENERATING = ("/v1/completions", "/v1/chat/completions")


@dataclass
class Request:
    """What an engine received. `left` is set when the client closed the connection before the answer was over."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    arrived: float = field(default_factory=time.monotonic)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    left_at: float | None = None
    over: bool = False

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def chat(self) -> bool:
        """Whether it is for the chat route."""
        return self.path == GENERATING[1]

    @property
    def kv(self) -> dict[str, Any] | None:
        """The `kv_transfer_params`, None if there are none."""
        return self.json.get("kv_transfer_params")

    @property
    def ident(self) -> str:
        """The request's id, as vLLM takes it from the header."""
        return self.header("x-request-id") or "none"

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key.lower() == name), None)
