r"""Server-sent events as bytes: found, counted and rewritten without parsing JSON.

vLLM writes an event as `data: <JSON on one line>\n\n`. A raw line feed or quote cannot occur inside
a JSON string, so the byte patterns below match structure and never a model's text.
"""

from __future__ import annotations

DONE = b"data: [DONE]"
END = b"\n\n"
_NEXT = b"\n\ndata: "
_NEXT_PLAIN = b'\n\ndata: {"id":'
_ERRORS = (b'data: {"error"', b'data: {"object":"error"', b'data: {"object": "error"')
_USAGE = b'"usage":{'
_USAGE_ONLY = b'"choices":[],"usage":{'
_NO_CHOICES = b'"choices":[]}'
"""The end of such an event of `/inference/v1/generate`, which has the usage before the choices."""
_FIRST_INDEX = b'"choices":[{"index":0,'
_CREATED = b'"created":'
_FINGERPRINT = b',"system_fingerprint":'
_NO_HANDLE = b',"kv_transfer_params":null}'
_FINISHED = b'"finish_reason":"'
UNFINISHED = b'"finish_reason":null'
PLAIN = b'data: {"id":'
"""The beginning of an event of plain data. Errors and the end mark begin otherwise."""
_ABORTED = b'"finish_reason":"abort"'
_ROLE = b'"delta":{"role":"'
_SPACED = b'data: {"id": '
_SPACED_FINISHED, _SPACED_UNFINISHED = b'"finish_reason": "', b'"finish_reason": null'
_ESCAPED_BACKSLASH, _ESCAPED_QUOTE = b"\\\\", b'\\"'
_MAX_COMPACTED = 256 << 10
"""Bytes. A longer line is not a last event, a usage or an error, and stays as it is: a line of this
length takes 8 ms.
"""
_MAX_STRINGS = 1024
"""Strings of a line. A line with more, and with one in six bytes, is not an event: each string
costs as much as 100 bytes.
"""
_MAX_TINY_LINES = 512
_TINY_LINE = 32


def is_comment(batch: bytes) -> bool:
    """Return whether a batch has comments alone."""
    return batch.startswith(b":") and all(line[:1] in (b":", b"") for line in batch.split(b"\n"))


def is_spaced(batch: bytes) -> bool:
    """Return whether a batch begins with data whose JSON has spaces. vLLM writes none, but for its
    errors.
    """
    return batch.startswith(_SPACED)


def compact(batch: bytes) -> bytes:
    """Return a batch of events with their data as vLLM writes it: without spaces outside of
    strings.
    """
    return b"\n".join(
        [_compact(line) if line.startswith(_SPACED) else line for line in batch.split(b"\n")]
    )


def _compact(line: bytes) -> bytes:
    if len(line) > _MAX_COMPACTED:
        return line
    text = line[6:]
    escapes = text.find(b"\\") >= 0
    # an escaped quote would be mistaken for a string's end; no JSON has these two bytes
    if escapes:
        if text.find(b"\0") >= 0 or text.find(b"\1") >= 0:
            return line
        text = text.replace(_ESCAPED_BACKSLASH, b"\0").replace(_ESCAPED_QUOTE, b"\1")
    quotes = text.count(b'"')
    if quotes > 2 * _MAX_STRINGS and 3 * quotes > len(text):
        return line
    parts = text.split(b'"')
    parts[::2] = [part.replace(b" ", b"") for part in parts[::2]]
    text = b'"'.join(parts)
    if escapes:
        text = text.replace(b"\1", _ESCAPED_QUOTE).replace(b"\0", _ESCAPED_BACKSLASH)
    return b"data: " + text


def has_tiny_lines(batch: bytes) -> bool:
    """Return whether a batch is many lines of a few bytes: each costs as much as an event, and an
    engine's events have at least 64 bytes.
    """
    if len(batch) <= _MAX_TINY_LINES:
        return False
    lines = batch.count(b"\n")
    return lines > _MAX_TINY_LINES and len(batch) < _TINY_LINE * lines


def is_regular(batch: bytes) -> bool:
    """Return whether every event of a batch has the form in which vLLM writes data: one line that
    begins with `data: `.
    """
    count = batch.count(END)
    return (
        batch.count(b"\n") == 2 * count
        and batch.count(_NEXT) == count - 1
        and batch.startswith(b"data: ")
        and b"\r" not in batch
    )


def data_lines(event: bytes) -> list[bytes]:
    """Return the lines of an event that hold data, each in vLLM's form; none for a comment."""
    return [
        b"data: " + _value(line[5:]) for line in event.split(b"\n") if line.startswith(b"data:")
    ]


def _value(text: bytes) -> bytes:
    """Return a value as clients read it: one space belongs to the framing. More of them are ignored
    before JSON only.
    """
    bare = text.lstrip(b" ")
    return bare if bare.startswith(b"{") else text.removeprefix(b" ")


def is_error(event: bytes) -> bool:
    """Return whether an event is an error object instead of data."""
    return event.startswith(_ERRORS)


def is_aborted(data: bytes) -> bool:
    """Return whether an event or a whole answer reports that generation was aborted. vLLM sends
    that when it is terminated.
    """
    return _ABORTED in data


def is_done(event: bytes) -> bool:
    """Return whether an event is the end mark."""
    return event.startswith(DONE)


def is_usage_only(event: bytes) -> bool:
    """Return whether an event is the last one of `include_usage`: no choices, the usage of the
    whole answer.
    """
    return _USAGE_ONLY in event or (_NO_CHOICES in event and _USAGE in event)


def has_usage(event: bytes) -> bool:
    """Return whether an event reports usage, its own or that of the whole answer."""
    return _USAGE in event


def is_role_only(event: bytes) -> bool:
    """Return whether an event is a chat's first chunk, which vLLM sends before the engine has
    produced anything.
    """
    return _ROLE in event


def is_last_of_choice(event: bytes) -> bool:
    """Return whether an event ends a choice."""
    return _FINISHED in event


def with_fingerprint(event: bytes, usage_event: bytes) -> bytes:
    """Return a choice's last event with the fingerprint of the usage event.

    vLLM puts it into the very last event: a stream without a usage event has it beside the finish
    reason.
    """
    at = usage_event.rfind(_FINGERPRINT)
    if at < 0 or _FINGERPRINT in event:
        return event
    value = usage_event[at + len(_FINGERPRINT) :].split(b",", 1)[0].rstrip().removesuffix(b"}")
    event = event.rstrip()
    behind = _NO_HANDLE if event.endswith(_NO_HANDLE) else b"}"  # vLLM has the fields in this order
    return event.removesuffix(behind) + _FINGERPRINT + value + behind + END


def may_be_special(batch: bytes) -> bool:
    """Return whether a batch of whole events may hold one that is not plain data: an error, the end
    of a choice, the usage, the end mark, or anything that does not have vLLM's form of data.
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
        # one choice in each event, and none of them ends
        return batch.find(b"\r") >= 0 or batch.find(finished) >= 0
    return (
        spaced
        or not is_regular(batch)
        or DONE in batch
        or _USAGE_ONLY in batch
        or _NO_CHOICES in batch
        or _FINISHED in batch
        or batch.startswith(_ERRORS)
        or b'\n\ndata: {"error"' in batch
        or b'\n\ndata: {"object":"error"' in batch
        or b'\n\ndata: {"object": "error"' in batch
    )


def plain_size(batch: bytes) -> int:
    """Return how many bytes at the beginning of a batch of whole events are plain data, in front of
    the first end of a choice; 0 if those may hold something else.
    """
    ended = batch.find(_FINISHED)
    size = len(batch) if ended < 0 else batch.rfind(END, 0, ended) + len(END)
    return 0 if size < len(END) or may_be_special(batch[:size]) else size


def has_end(read: bytes) -> bool:
    """Return whether a read has the end of an event.

    One byte is found many times as fast as two, and ids of a long prompt have no line feed.
    """
    at = read.find(b"\n")
    return at >= 0 and read.find(END, at) >= 0


def whole_size(read: bytes) -> int:
    """Return how many bytes at the beginning of a read go to the end of its last whole event, 0 if
    it has none. As fast as `has_end`.
    """
    at = read.rfind(b"\n")
    end = read.rfind(END, 0, at + 1) if at >= 0 else -1
    return 0 if end < 0 else end + len(END)


def payload(event: bytes) -> bytes:
    """Return the JSON of an event without its framing."""
    return event.removeprefix(b"data:").strip()


def with_index(event: bytes, index: int) -> bytes:
    """Return an event of a stream with one choice as one of choice `index`. Unchanged if it has no
    choice 0.
    """
    return event.replace(_FIRST_INDEX, b'"choices":[{"index":%d,' % index, 1)


def created_of(event: bytes) -> bytes | None:
    """Return the digits of an event's `created`, None if it has none."""
    at = event.find(_CREATED)
    return None if at < 0 else event[at + len(_CREATED) :].split(b",", 1)[0]


def with_created(event: bytes, created: bytes) -> bytes:
    """Return an event with another time of creation, unchanged if it has none."""
    own = created_of(event)
    return event if own is None else event.replace(_CREATED + own, _CREATED + created, 1)


def data(json: bytes) -> bytes:
    """Return a JSON value as an event."""
    return b"data: " + json + END
