r"""Server-sent events as bytes: found, counted and rewritten without parsing JSON.

vLLM writes an event as `data: <JSON on one line>\n\n`. A raw line feed or quote cannot occur inside a JSON string, so the
byte patterns below match structure and never a model's text.
"""

from __future__ import annotations

DONE = b"data: [DONE]"
END = b"\n\n"
_NEXT = b"\n\ndata: "
_NEXT_PLAIN = b'\n\ndata: {"id":'
_ERRORS = (b'data: {"error"', b'data: {"object":"error"', b'data: {"object": "error"')
_USAGE_ONLY = b'"choices":[],"usage":{'
_FIRST_INDEX = b'"choices":[{"index":0,'
_CREATED = b'"created":'
_FINGERPRINT = b',"system_fingerprint":'
_FINISHED = b'"finish_reason":"'
UNFINISHED = b'"finish_reason":null'
PLAIN = b'data: {"id":'
"""What an event of plain data begins with, and neither an error nor the end mark does."""
_ABORTED = b'"finish_reason":"abort"'
_ROLE = b'"delta":{"role":"'
_SPACED = b'data: {"id": '
_SPACED_FINISHED, _SPACED_UNFINISHED = b'"finish_reason": "', b'"finish_reason": null'
_ESCAPED_BACKSLASH, _ESCAPED_QUOTE = b"\\\\", b'\\"'
_LONGEST_COMPACTED = 256 << 10
"""Bytes. A longer line is no last event, no usage and no error: it is left as it is, since this one costs 8 ms."""
_MOST_TEXTS = 1024
"""Strings of a line that are more than a sixth of its bytes: it is no event then, and each of them costs as much as 100 bytes."""
_FEW_LINES = 512
_SHORT_LINE = 32


def is_spaced(batch: bytes) -> bool:
    """Tell whether a batch begins with data whose JSON has spaces, where vLLM writes none. Its errors do have them."""
    return batch.startswith(_SPACED)


def compact(batch: bytes) -> bytes:
    """Return a batch of events with their data as vLLM writes it: without spaces outside of strings."""
    return b"\n".join([_compact(line) if line.startswith(_SPACED) else line for line in batch.split(b"\n")])


def _compact(line: bytes) -> bytes:
    if len(line) > _LONGEST_COMPACTED:
        return line
    text = line[6:]
    escapes = text.find(b"\\") >= 0
    if escapes:  # an escaped quote would be taken for a string's end; no JSON has these two bytes
        if text.find(b"\0") >= 0 or text.find(b"\1") >= 0:
            return line
        text = text.replace(_ESCAPED_BACKSLASH, b"\0").replace(_ESCAPED_QUOTE, b"\1")
    quotes = text.count(b'"')
    if quotes > 2 * _MOST_TEXTS and 3 * quotes > len(text):
        return line
    parts = text.split(b'"')
    parts[::2] = [part.replace(b" ", b"") for part in parts[::2]]
    text = b'"'.join(parts)
    if escapes:
        text = text.replace(b"\1", _ESCAPED_QUOTE).replace(b"\0", _ESCAPED_BACKSLASH)
    return b"data: " + text


def has_tiny_lines(batch: bytes) -> bool:
    """Tell whether a batch is many lines with next to nothing in them: each costs as much as an event of
    an engine, none of which has less than 64 bytes.
    """
    if len(batch) <= _FEW_LINES:
        return False
    lines = batch.count(b"\n")
    return lines > _FEW_LINES and len(batch) < _SHORT_LINE * lines


def is_regular(batch: bytes) -> bool:
    """Tell whether every event of a batch is as vLLM writes data: one line that begins with `data: `."""
    count = batch.count(END)
    return (
        batch.count(b"\n") == 2 * count
        and batch.count(_NEXT) == count - 1
        and batch.startswith(b"data: ")
        and b"\r" not in batch
    )


def data_lines(event: bytes) -> list[bytes]:
    """Return the lines of an event that hold data, as vLLM would write each; none for a comment."""
    return [b"data: " + _value(line[5:]) for line in event.split(b"\n") if line.startswith(b"data:")]


def _value(text: bytes) -> bytes:
    """Return a value as clients read it: one space belongs to the framing, more of them mean nothing before JSON alone."""
    bare = text.lstrip(b" ")
    return bare if bare.startswith(b"{") else text.removeprefix(b" ")


def is_error(event: bytes) -> bool:
    """Tell whether an event is an error object instead of data."""
    return event.startswith(_ERRORS)


def is_aborted(data: bytes) -> bool:
    """Tell whether an event, or a whole answer, was given up half-way. vLLM says so when it is terminated, as if it were done."""
    return _ABORTED in data


def is_done(event: bytes) -> bool:
    """Tell whether an event is the end mark."""
    return event.startswith(DONE)


def is_usage_only(event: bytes) -> bool:
    """Tell whether an event is the last one of `include_usage`: no choices, the usage of the whole answer."""
    return _USAGE_ONLY in event


def is_role_only(event: bytes) -> bool:
    """Tell whether an event is a chat's opening chunk, which vLLM sends before the engine has produced anything."""
    return _ROLE in event


def is_last_of_choice(event: bytes) -> bool:
    """Tell whether an event ends a choice."""
    return _FINISHED in event


def with_fingerprint(event: bytes, usage_event: bytes) -> bytes:
    """Return a choice's last event with the fingerprint that stands in the usage event.

    vLLM puts it into the very last event: a stream without a usage event has it beside the finish reason.
    """
    at = usage_event.rfind(_FINGERPRINT)
    if at < 0 or _FINGERPRINT in event:
        return event
    value = usage_event[at + len(_FINGERPRINT) :].split(b",", 1)[0].rstrip().removesuffix(b"}")
    return event.rstrip().removesuffix(b"}") + _FINGERPRINT + value + b"}" + END


def may_be_special(batch: bytes) -> bool:
    """Tell whether a batch of whole events holds one that is not plain data: an error, a finish, the usage, the end mark,
    or anything that is not written as vLLM writes its data.
    """
    count = batch.count(END)
    spaced = is_spaced(batch)
    if (
        batch.startswith(PLAIN)
        and batch.count(_SPACED_UNFINISHED if spaced else UNFINISHED) == count
        and batch.count(_NEXT_PLAIN) == count - 1
        and batch.count(b"\n") == 2 * count
    ):
        finished = _SPACED_FINISHED if spaced else _FINISHED
        return batch.find(b"\r") >= 0 or batch.find(finished) >= 0  # one choice in each event, and none of them ends
    return (
        spaced
        or not is_regular(batch)
        or DONE in batch
        or _USAGE_ONLY in batch
        or _FINISHED in batch
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


def created_of(event: bytes) -> bytes | None:
    """Return the digits of an event's `created`, None if it has none."""
    at = event.find(_CREATED)
    return None if at < 0 else event[at + len(_CREATED) :].split(b",", 1)[0]


def with_created(event: bytes, created: bytes) -> bytes:
    """Return an event with another time of creation: that of the stream it becomes a part of."""
    own = created_of(event)
    return event if own is None else event.replace(_CREATED + own, _CREATED + created, 1)


def has_first_index(event: bytes) -> bool:
    """Tell whether `with_index` would find the choice it renames."""
    return _FIRST_INDEX in event


def data(json: bytes) -> bytes:
    """Frame a JSON value as an event."""
    return b"data: " + json + END
