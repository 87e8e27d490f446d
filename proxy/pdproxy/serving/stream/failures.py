"""Errors that events of a stream report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.kit.errors import EngineError, EngineRefusedError
from pdproxy.upstream.client import Answer
from pdproxy.wire import sse
from pdproxy.wire.engine import error_of


class GivenUpError(EngineError):
    """An engine has ended an answer before its end, without an error: it was terminated."""


def failure_in(event: bytes, lines: Sequence[bytes]) -> EngineError | None:
    """Return the error that an event reports, None if it is data. `lines` are its data lines."""
    if has_other_lines(event):
        return other_lines()
    if sse.is_aborted(event):
        return _refusal(event)
    return next((_refusal(line) for line in lines if sse.is_error(line)), None)


def has_other_lines(events: bytes) -> bool:
    """Return whether a client would find other events there than pdproxy."""
    return b"\r" in events


def other_lines() -> EngineError:
    """Return the error for events that `has_other_lines`."""
    return EngineError("the engine sent something else than vLLM's events")


def as_event(answer: Answer) -> EngineError:
    """Return the error for an engine's whole answer to a client whose stream has begun: the client
    gets it as an event.
    """
    if answer.status < 400:
        return EngineError("an engine answered a stream with a whole answer")
    return EngineRefusedError(
        f"an engine answered {answer.status}", status=answer.status, body=answer.body
    )


def tiny_lines() -> EngineError:
    """Return the error for a batch that `sse.has_tiny_lines`."""
    return EngineError("the engine sent many lines that are almost empty")


def _refusal(event: bytes) -> EngineError:
    if sse.is_aborted(event):
        return GivenUpError("the engine gave the answer up half-way")
    payload = sse.payload(event)
    detail = error_of(payload)
    code = detail.code if detail is not None else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    # The engine's text may quote the prompt. The client gets it; the log, which shows this message,
    # gets some of its words (`wire.engine_words`).
    return EngineRefusedError(
        f"the engine sent an error event with status {status}", status=status, body=payload
    )
