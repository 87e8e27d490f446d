"""Answers that faults send in place of the application's."""

from __future__ import annotations

from pdproxy_lab.sim import failed
from pdproxy_lab.sim.faults.targets import AnswerTarget, Message
from pdproxy_lab.sim.sse import DONE

_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_JSON = (b"content-type", b"application/json")
_VARY = (b"vary", b"Origin")


async def send_whole(
    answer: AnswerTarget, status: int, body: bytes, *headers: tuple[bytes, bytes]
) -> None:
    """Send a whole answer."""
    named = [(b"content-length", b"%d" % len(body)), _JSON, _VARY, *headers]
    await answer.writer.send({"type": "http.response.start", "status": status, "headers": named})
    await answer.writer.send({"type": "http.response.body", "body": body, "more_body": False})
    answer.ended()


async def send_stream(answer: AnswerTarget, *events: bytes) -> None:
    """Send events (empty ones are left out) and the stream's regular end; before them the head if
    it has not been sent.
    """
    await _send_head(answer)
    for event in filter(None, events):
        await answer.writer.send({"type": "http.response.body", "body": event, "more_body": True})
    await answer.writer.send({"type": "http.response.body", "body": b"", "more_body": False})
    answer.ended()


async def send_failure(
    answer: AnswerTarget, message: str, status: int = 500, *, done: bool = True, more: bytes = b""
) -> None:
    """End a stream as its route ends one that has failed. `done`: a route that has `[DONE]` sends
    it. `more`: what stands behind the error; all of it is one write then.
    """
    due = bytes(answer.due.get("body", b"")) if answer.due is not None else b""
    version = answer.engine.facts.version
    events = failed.streamed(answer.path, version, message, status, due=due)
    if events is not None:
        pieces = [*events, more, done_of(answer) if done else b""]
        await send_stream(answer, *([b"".join(pieces)] if more else pieces))
        return
    await _send_head(answer)
    answer.ended()
    answer.connection.close()


def done_of(answer: AnswerTarget) -> bytes:
    """Return the mark at the end of a stream; empty on routes whose events have names."""
    return b"" if answer.path in (failed.MESSAGES, failed.RESPONSES) else DONE


async def _send_head(answer: AnswerTarget) -> None:
    if not answer.writer.head_out:
        start: Message = {"type": "http.response.start", "status": 200, "headers": [_SSE, _VARY]}
        await answer.writer.send(start)
