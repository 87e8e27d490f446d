"""What both generating routes share: ids, fingerprints, usage, and the ends of whole and streamed
answers.

Owns the order of refusals, and which of them release P's KV.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol
from zlib import crc32

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api.errors import RefusedRequest, failure, refusal
from pdproxy_lab.sim.api.generation import LoadFailedError
from pdproxy_lab.sim.api.protocol import GenerationBody
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.error_body import error_event
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.failed import INTERNAL
from pdproxy_lab.sim.request import EngineDeadError, Medium

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def fingerprint(facts: SimFacts) -> str:
    """Return `system_fingerprint`: the version, and a hash of what makes answers differ."""
    parts = (facts.model, facts.weights, facts.block_size, facts.max_model_len, facts.connector)
    return f"vllm-{facts.version}-{crc32(repr(parts).encode()):08x}"


def request_id(prefix: str, request: Request, body: GenerationBody) -> str:
    """Return the id of an answer: the client's own, else 16 random hex digits."""
    return (
        f"{prefix}-{request.headers.get('x-request-id') or body.request_id or secrets.token_hex(8)}"
    )


def rank_of(request: Request) -> int | None:
    """Return the data-parallel rank that a request names; what is no number names none."""
    try:
        return int(request.headers["x-data-parallel-rank"])
    except (KeyError, ValueError):
        return None


def check_model(body_model: str | None, engine: SimEngine) -> None:
    """Refuse a model that is not served, and everything once the core is dead."""
    check_name(body_model, engine)
    if engine.dead:
        raise EngineDeadError


def check_name(body_model: str | None, engine: SimEngine) -> None:
    """Refuse a model that is not served."""
    if body_model and body_model != engine.facts.model and body_model not in engine.adapters:
        raise RefusedRequest(
            f"The model `{body_model}` does not exist. Valid aliases: {engine.facts.model}.",
            "model",
            kind="NotFoundError",
            status=404,
        )


def shown_model(body_model: str | None, engine: SimEngine) -> str:
    """Return the name that an answer shows: an adapter's own, or the model's."""
    return body_model if body_model in engine.adapters and body_model else engine.facts.model


def usage(prompt: int, completion: int) -> dict[str, object]:
    """Return a usage with its three counts."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def details(
    facts: SimFacts, cached: int, created: int | None = None, media: Sequence[Medium] = ()
) -> dict[str, object] | None:
    """Return `prompt_tokens_details`, None unless the engine's flag asks for them. Chats have
    `created` and `media`, too.
    """
    if not facts.enable_prompt_tokens_details:
        return None
    seen = {"image": sum(one.picture.length for one in media)} if media else None
    return {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": seen}


class Handled(Protocol):
    """A body that may have a KV handle."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The handle."""


async def answered(
    engine: SimEngine, body: Handled | None, request: Request, work: Awaitable[Response]
) -> Response:
    """Return a route's answer, errors as vLLM's. A request that never ran leaves no KV waiting on
    P. `body` None: it does.
    """
    params = body.kv_transfer_params if body is not None else None
    accepted = False
    try:
        found = await _unless_left(request, work)
        accepted = found.status_code == 200
        return found
    except RefusedRequest as error:
        return refusal(error)
    except EngineDeadError:
        return failure(since.dead_message(engine.facts.version))
    except LoadFailedError:
        return failure(INTERNAL)
    finally:
        if params and params.get("do_remote_prefill") and not accepted:
            engine.reject(params, rank_of(request))


async def _unless_left(request: Request, work: Awaitable[Response]) -> Response:
    """Cancel the work when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=499)
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def streamed(events: AsyncGenerator[bytes, None], version: str, *, chat: bool = False) -> Response:
    """Return a stream of events as the answer; a later failure is an event, too. `version`:
    vLLM's.
    """
    return StreamingResponse(_guarded(events, version, chat), media_type="text/event-stream")


def streamed_refusal(error: RefusedRequest, version: str, *, chat: bool = False) -> Response:
    """Return the answer to a stream that is refused after its status was sent."""
    return Response(_refused(error, version, chat) + DONE, media_type="text/event-stream")


def _refused(error: RefusedRequest, version: str, chat: bool) -> bytes:
    return error_event(
        str(error), error.kind, error.status, error.param, compact=chat and since.v033(version)
    )


async def _guarded(
    events: AsyncGenerator[bytes, None], version: str, chat: bool
) -> AsyncGenerator[bytes, None]:
    compact = chat and since.v033(version)
    try:
        async with aclosing(events) as found:
            async for one in found:
                yield one
    except RefusedRequest as error:
        yield _refused(error, version, chat)
    except EngineDeadError:
        yield error_event(since.dead_message(version), compact=compact)
    except LoadFailedError:
        yield error_event(INTERNAL, compact=compact)
    yield DONE
