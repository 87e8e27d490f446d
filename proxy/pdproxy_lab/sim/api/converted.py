"""Routes that are a chat's in other words, as in vLLM: what the chat route answers is translated.

Owns how its answer is taken apart. So KV is moved by the chat route alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any, cast

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.chat import chat
from pdproxy_lab.sim.api.errors import response
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.engine import SimEngine

_EVENTS = "text/event-stream"
Json = dict[str, Any]


async def as_chat(
    engine: SimEngine,
    asked: ChatBody,
    request: Request,
    date: Callable[[], str],
    *,
    whole: Callable[[Json], Json],
    refused: Callable[[Json], Json],
    events: Callable[[AsyncIterable[bytes]], AsyncGenerator[bytes, None]],
) -> Response:
    """Answer a request as the chat route would, in other words.

    `whole`: a chat's whole answer. `refused`: its error. `events`: the events of its stream,
    without `data: `.
    """
    found = await answer.answered(engine, asked, request, chat(engine, asked, request, date))
    if found.headers.get("content-type", "").startswith(_EVENTS):
        return StreamingResponse(events(_chunks(found)), media_type=_EVENTS)
    if not found.body:
        return found  # the client has left
    said = msgspec.json.decode(found.body)
    if found.status_code == 200:
        return response(whole(said))
    return response(refused(said["error"]), found.status_code)


async def _chunks(found: Response) -> AsyncGenerator[bytes, None]:
    if not isinstance(found, StreamingResponse):  # refused when its head had been sent
        for event in bytes(found.body).split(b"\n\n")[:-1]:
            yield event.removeprefix(b"data: ")
        return
    events = cast("AsyncGenerator[bytes, None]", found.body_iterator)
    try:
        async for event in events:
            yield event.removeprefix(b"data: ").strip()
    finally:
        await events.aclose()
