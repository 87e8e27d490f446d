"""The events of `/v1/realtime`, each a message of a WebSocket: what is read of a client's and of an
engine's, and those that the proxy sends itself, in vLLM's form.

A client's event is read without its audio. What it is counts as `json.loads` reads it, which
engines use: of a name that comes twice, the last one. What msgspec refuses is refused here, though
`json.loads` takes some of it: an engine could find another event in it. Source: vLLM 0.32.0
`entrypoints/speech_to_text/realtime`.
"""

from __future__ import annotations

import msgspec

from pdproxy.kit.errors import BodyTooLargeError, Fault, PdproxyError, RefusalReason
from pdproxy.wire.engine import UNREADABLE, Usage
from pdproxy.wire.errors import error_body
from pdproxy.wire.model import model_name

MAX_MESSAGE = 16 << 20
"""Bytes of a client's message: uvicorn, which serves vLLM, takes no more."""
MAX_EVENT = 256 << 10
"""Bytes of an engine's message. Its longest one has the text of one utterance: a word has ten
bytes, and an hour 10,000 words.
"""
_MAX_UPDATE = 64 << 10
"""Bytes of a `session.update`, all of whose fields are read. vLLM reads its model alone."""
_ABSENT, _TRUE = msgspec.Raw(b"null"), msgspec.Raw(b"true")
CREATED, UPDATE, COMMIT = "session.created", "session.update", "input_audio_buffer.commit"
DELTA, DONE, ERROR = "transcription.delta", "transcription.done", "error"


class _Read(msgspec.Struct, frozen=True):
    type: msgspec.Raw = _ABSENT
    final: msgspec.Raw = _ABSENT


class _Sent(msgspec.Struct, frozen=True):
    type: msgspec.Raw = _ABSENT
    usage: Usage | None = None


class _Error(msgspec.Struct, frozen=True):
    type: str
    error: str
    code: str


class _Failure(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: int | str | None = None
    reason: str | None = None


class _FailureBody(msgspec.Struct, frozen=True):
    error: _Failure


_read = msgspec.json.Decoder(_Read)
_sent = msgspec.json.Decoder(_Sent)
_type = msgspec.json.Decoder(str)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_failure = msgspec.json.Decoder(_FailureBody)
_MAX_TYPE = 256
"""Bytes of a type in JSON: all that there are have 25 letters, of which each is at most an escape
of six bytes.
"""


class InvalidEventError(ValueError):
    """A client's event is answered by an error. `answer`: that event."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.answer = error_event(text, code)


def session_created(session: str, created: int) -> bytes:
    """Return an engine's first event. `created`: in Unix seconds."""
    return msgspec.json.encode({"type": CREATED, "id": f"sess-{session}", "created": created})


def error_event(text: str, code: str) -> bytes:
    """Return the event of an error."""
    return msgspec.json.encode(_Error(ERROR, text, code))


def not_validated() -> bytes:
    """Return the answer to an event before the session's model is known, in vLLM's words."""
    text = "Model not validated. Make sure to validate the model by sending a session.update event."
    return error_event(text, "model_not_validated")


def read_event(message: bytes) -> tuple[str | None, bool]:
    """Return the type of a client's event, None if it has none, and whether it says that the audio
    is complete (`final`). What is no object has no type.

    Raises:
        InvalidEventError: it is no JSON, or it is too long for a `session.update`.
    """
    try:
        found = _read.decode(message)
    except msgspec.ValidationError:
        return None, False
    except UNREADABLE:
        raise InvalidEventError("Invalid JSON", "invalid_json") from None
    kind = _type_of(found.type)
    if kind == UPDATE and len(message) > _MAX_UPDATE:
        text = f"A {UPDATE} may have {_MAX_UPDATE} bytes at most"
        raise InvalidEventError(text, "invalid_event")
    return kind, found.final == _TRUE


def model_in(update: bytes) -> str:
    """Return the model that a `session.update` names.

    Raises:
        InvalidEventError: it names none.
    """
    raw = _fields.decode(update).get("model", _ABSENT)
    try:
        model = model_name(raw)
    except UNREADABLE:
        raise InvalidEventError("Invalid field: model", "invalid_event") from None
    if model is None:
        raise InvalidEventError("Missing required field: model", "invalid_event")
    return model


def with_model(update: bytes, model: str) -> bytes:
    """Return a `session.update` with another name of its model."""
    fields = _fields.decode(update)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def read_sent(event: bytes) -> tuple[str | None, Usage | None]:
    """Return the type of an engine's event, None if it has none, and the usage that it reports."""
    try:
        found = _sent.decode(event)
        return _type_of(found.type), found.usage
    except UNREADABLE:
        return None, None


def _type_of(raw: msgspec.Raw) -> str | None:
    if len(raw) > _MAX_TYPE:
        return None
    try:
        return _type.decode(raw)
    except UNREADABLE:
        return None


def failure_event(error: PdproxyError) -> bytes:
    """Return the event of an error behind which the WebSocket closes. Its text is that of other
    routes.
    """
    found = _failure.decode(error_body(error)).error
    code = found.reason or (found.code if isinstance(found.code, str) else found.type)
    return error_event(found.message, code)


def close_code(error: PdproxyError) -> int:
    """Return the code with which a WebSocket closes (RFC 6455, 7.4.1, and IANA's registry)."""
    if isinstance(error, BodyTooLargeError):
        return 1009  # message too big
    if error.reason is RefusalReason.DRAINING:
        return 1001  # going away
    if error.fault is Fault.CAPACITY:
        return 1013  # try again later
    if error.fault is Fault.CLIENT:
        return 1008  # policy violation
    return 1011  # internal error
