"""What plain events have in common: learned from one of them, proven, and then found in others by a few compares.

Nearly all events of a stream are the same JSON with another piece of text and other token ids. Whoever knows what stands around
those two needs no parser, no matter how the engine spaces its JSON or which fields it writes. A model's text cannot pass for what
stands behind it: a quote in it is escaped, and `middle` begins with the text's closing quote.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire.chunks import HEADS, LONGEST
from pdproxy.wire.sse import END

_PREFIX = b"data: "
_OPENING = re.compile(rb'data: \{"id": ?"')
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"')
_IDS = re.compile(rb'"token_ids": ?\[')
_PROBE, _PROBE_IDS = "a text that no model was asked for", [20011, 3]
_MOST_KNOWN = 32
_MOST_OPENINGS = 512
"""Sizes of chunks for which a template keeps their beginning: more than events with short texts have."""


class Template:
    """A plain event is `opening`, fields and a text, `middle`, and then, if ids are taken, the ids and `end`.

    `opening` goes to the quote of the event's id, `middle` begins with the text's closing one. With ids, `middle` ends with `[`,
    the event's last one, and `end` begins with `]`; without, `end` is empty and `middle` goes to the event's end. In a chunk,
    `last` is what it ends with, `tail` what stands there instead once the ids are out; `openings` has what whole ones begin with,
    by their size in bytes, as far as such were seen.

    Streams of one form share one template: what all of them compare with stays in the processor's caches.
    """

    __slots__ = ("before_ids", "end", "last", "middle", "opening", "openings", "tail", "takes_ids", "width")

    def __init__(self, opening: bytes, middle: bytes, end: bytes, *, takes_ids: bool) -> None:
        self.opening = opening
        self.middle = middle
        self.before_ids = middle[:-1]
        self.end = end
        self.takes_ids = takes_ids
        self.last = (end if takes_ids else middle) + b"\r\n"
        self.tail = b"null" + self.last[1:]
        self.width = len(opening)
        self.openings: dict[int, bytes] = {}

    def opened(self, size: int) -> bytes | None:
        """Return what a whole chunk of that size begins with, and keep it while they are few; None if it is too long."""
        if size >= LONGEST:
            return None
        opening = HEADS[size] + self.opening
        if len(self.openings) < _MOST_OPENINGS:
            self.openings[size] = opening
        return opening

    def __repr__(self) -> str:
        return f"<Template {self.opening!r} {self.middle!r} {self.end!r}>"


_UNKNOWN = Template(b"\n", b"\n\n\n", b"", takes_ids=False)
"""No event is like this."""
_known: dict[tuple[bytes, bytes, bytes, bool], Template] = {}
_latest: dict[bool, Template] = {}


def guess(*, takes_ids: bool) -> Template:
    """Return the template that was learned last. What does not match it is learned from, so a wrong guess costs little."""
    return _latest.get(takes_ids, _UNKNOWN)


def learn(event: bytes, *, takes_ids: bool) -> Template | None:
    """Return the template of an event; None unless it is plain data.

    Plain is one choice that has not ended and has text, and no usage; with `takes_ids`, a list of ids as well.
    """
    opening, text = _OPENING.match(event), _TEXT.search(event)
    closing = event.find(b'"', text.end()) if text else -1
    if (
        opening is None
        or text is None
        or closing < 0
        or not event.endswith(END)
        or event.count(b"\n") != 2
        or b"\r" in event
    ):
        return None
    middle, end = event[closing:], b""
    if takes_ids:
        ids = _IDS.search(event, closing)
        bracket = event.find(b"]", ids.end()) if ids else -1
        if ids is None or bracket < 0 or event.find(b"[", bracket) >= 0:
            return None
        middle, end = event[closing : ids.end()], event[bracket:]
    key = opening[0], middle, end, takes_ids
    if key in _known:
        _latest[takes_ids] = _known[key]
        return _known[key]
    if middle.startswith(b'""') or not _is_plain(event, event[: text.end()], middle, end, takes_ids):
        return None
    if len(_known) >= _MOST_KNOWN:  # engines that write each event in another form: nothing to be learned from those
        _known.clear()
    _known[key] = _latest[takes_ids] = Template(*key[:3], takes_ids=takes_ids)
    return _known[key]


def _is_plain(event: bytes, front: bytes, middle: bytes, end: bytes, takes_ids: bool) -> bool:
    """Prove it: with another text and other ids in their places, the event says the same but for those."""
    other = front + _PROBE.encode() + middle
    if takes_ids:
        other += b",".join([b"%d" % one for one in _PROBE_IDS]) + end
    try:
        was, now = msgspec.json.decode(event[len(_PREFIX) :]), msgspec.json.decode(other[len(_PREFIX) :])
        (choice,), (probed,) = was["choices"], now["choices"]
        if choice["finish_reason"] is not None or choice.get("logprobs") is not None:
            return False  # what differs in each event is no form
        if was.get("usage") is not None or "error" in was:
            return False
        if "delta" in choice:
            (kind,) = choice["delta"]
            text, probe = choice["delta"].pop(kind), probed["delta"].pop(kind)
        else:
            text, probe = choice.pop("text"), probed.pop("text")
        if takes_ids and (not isinstance(choice.pop("token_ids"), list) or probed.pop("token_ids") != _PROBE_IDS):
            return False
        return isinstance(text, str) and probe == _PROBE and was == now
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return False
