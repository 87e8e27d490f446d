r"""Server-sent events as bytes: found, counted and rewritten without parsing JSON.

vLLM writes an event as `data: <JSON on one line>\n\n`. A raw line feed or quote cannot occur inside a JSON string, so the
byte patterns below match structure and never a model's text.
"""

from __future__ import annotations

DONE = b"data: [DONE]"
END = b"\n\n"
_ERRORS = (b'data: {"error"', b'data: {"object":"error"', b'data: {"object": "error"')
_USAGE_ONLY = b'"choices":[],"usage":{'
_FIRST_INDEX = b'"choices":[{"index":0,'
_ABORTED = b'"finish_reason":"abort"'
_ROLE = b'"delta":{"role":"'


def is_error(event: bytes) -> bool:
    """Tell whether an event is an error object instead of data."""
    return event.startswith(_ERRORS)


def is_aborted(data: bytes) -> bool:
    """Tell whether an event, or a whole answer, was given up half-way. vLLM says so when it is terminated, as if it were done."""
    return _ABORTED in data


def is_done(event: bytes) -> bool:
    """Tell whether an event is the end mark."""
    return event.startswith(DONE)


def is_comment(event: bytes) -> bool:
    """Tell whether an event is a keep-alive comment."""
    return event.startswith(b":")


def is_usage_only(event: bytes) -> bool:
    """Tell whether an event is the last one of `include_usage`: no choices, the usage of the whole answer."""
    return _USAGE_ONLY in event


def is_role_only(event: bytes) -> bool:
    """Tell whether an event is a chat's opening chunk, which vLLM sends before the engine has produced anything."""
    return _ROLE in event


def may_need_care(batch: bytes) -> bool:
    """Tell whether a batch of whole events holds one that is not plain data: an error, an abort, the usage or the end mark."""
    return (
        DONE in batch
        or _USAGE_ONLY in batch
        or _ABORTED in batch
        or batch.startswith(_ERRORS)
        or b'\n\ndata: {"error"' in batch
        or b'\n\ndata: {"object":"error"' in batch
        or b'\n\ndata: {"object": "error"' in batch
    )


def payload(event: bytes) -> bytes:
    """Return the JSON of an event without its framing."""
    return event.removeprefix(b"data:").strip()


def with_index(event: bytes, index: int) -> bytes:
    """Return an event of a single-choice stream as one of choice `index`. Unchanged if it holds no choice 0."""
    return event.replace(_FIRST_INDEX, b'"choices":[{"index":%d,' % index, 1)


def has_first_index(event: bytes) -> bool:
    """Tell whether `with_index` would find the choice it renames."""
    return _FIRST_INDEX in event


def data(json: bytes) -> bytes:
    """Frame a JSON value as an event."""
    return b"data: " + json + END
