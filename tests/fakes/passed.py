"""Requests of the routes that one engine serves whole, and how engines are made to answer them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy_lab.sim.journal import Request
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.world import PROMPT, World

PASSED = [entry for entry in TABLE if entry.kind is RouteKind.PASSED]
FORMS = [entry.path for entry in PASSED if entry.form]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = [entry.path for entry in PASSED if entry.has_body and not entry.form]
"""Those whose bodies are JSON."""
VLLM = [
    tuple(line.split())
    for line in (Path(__file__).parent / "vllm_routes.txt").read_text().splitlines()
    if not line.startswith("#")
]
HANDLE = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [1]}


def responses(**fields: Any) -> dict[str, Any]:
    """A body of `/v1/responses` that one engine serves whole: only engines take a text for a
    number.
    """
    return {"model": "tiny", "input": PROMPT, "max_output_tokens": "4", "temperature": 0, **fields}


def message(**fields: Any) -> dict[str, Any]:
    """A body of `/v1/messages` that one engine serves whole."""
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "tiny", "messages": messages, "max_tokens": "4", "temperature": 0, **fields}


BODIES = {RESPONSES: responses(), MESSAGES: message()}
STREAMED = [RESPONSES, MESSAGES]
_OWN = {"id", "item_id", "created_at", "cached_tokens", "cache_write_tokens"}
"""Fields that differ between two answers to one request."""


def everyone(w: World, path: str, script: Callable[[Reply], Awaitable[None]]) -> list[Request]:
    """Have all engines answer a path so; return the list that its requests go to."""
    seen: list[Request] = []

    async def noted(reply: Reply) -> None:
        seen.append(reply.request)
        await script(reply)

    for engine in w.engines:
        engine.admin = {**engine.admin, path: noted}
    return seen


async def fine(reply: Reply) -> None:
    """An answer."""
    await reply.whole(b'{"fine":true}')


def asked(engine: FakeEngine, path: str) -> int:
    """How many requests of a path an engine has had."""
    return sum(1 for one in engine.sim.journal._others.kept if one.path == path)


def shape(event: bytes) -> Any:
    """Return an event's name and data, with a star for each id, time and count of cached tokens."""
    name, _, data = event.partition(b"data: ") if b"data: " in event else (b"", b"", event)

    def still(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "*" if k in _OWN else still(v) for k, v in value.items()}
        return [still(one) for one in value] if isinstance(value, list) else value

    return name, still(json.loads(data))
