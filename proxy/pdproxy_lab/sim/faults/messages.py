"""Answers that faults send in place of the application's."""

from __future__ import annotations

from pdproxy_lab.sim.faults.targets import AnswerTarget, Message

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
    if not answer.writer.head_out:
        start: Message = {"type": "http.response.start", "status": 200, "headers": [_SSE, _VARY]}
        await answer.writer.send(start)
    for event in filter(None, events):
        await answer.writer.send({"type": "http.response.body", "body": event, "more_body": True})
    await answer.writer.send({"type": "http.response.body", "body": b"", "more_body": False})
    answer.ended()
