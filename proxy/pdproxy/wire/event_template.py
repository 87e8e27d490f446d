"""The common form of the plain events of a stream: learned from one event, then recognized in
others by a few comparisons.

Nearly all events of a stream are the same JSON with another piece of text and other token ids. If
the bytes around those two are known, no parser is needed, whatever spaces and fields the engine
writes. A model's text cannot be mistaken for the bytes behind it: a quote in the text is escaped,
and `middle` begins with the text's closing quote.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire import inside
from pdproxy.wire.chunks import MAX_CHUNK, SIZE_LINE_OF_CHUNK
from pdproxy.wire.sse import END

_PREFIX = b"data: "
_OPENING = re.compile(rb'data: \{"id": ?"')
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"')
_IDS = re.compile(rb'"token_ids": ?\[')
_TEST_TEXT, _TEST_IDS = "a text that no model was asked for", [20011, 3]
_MAX_TEMPLATES = 32
_MAX_OPENINGS = 512
"""For how many sizes of chunks a template keeps the opening: events with short texts have fewer
sizes.
"""


class EventTemplate:
    """The form of plain events: `opening`, fields and a text, `middle`, and then, if ids are taken,
    the ids and `end`.

    `opening` goes to the opening quote of the event's id, `middle` begins with the closing quote of
    the text. With ids, `middle` ends with `[`, the last one of the event, and `end` begins with
    `]`. Without ids, `end` is empty and `middle` goes to the end of the event. In a chunk, `last`
    is its last bytes, and `tail` replaces them once the ids are removed. `openings` has the first
    bytes of whole chunks by their size, for the sizes that were used.

    Streams of one form share one template: then the bytes that all of them compare with stay in the
    processor's caches.
    """

    __slots__ = (
        "before_ids",
        "end",
        "last",
        "middle",
        "opening",
        "opening_size",
        "openings",
        "tail",
        "takes_ids",
    )

    def __init__(self, opening: bytes, middle: bytes, end: bytes, *, takes_ids: bool) -> None:
        self.opening = opening
        self.middle = middle
        self.before_ids = middle[:-1]
        self.end = end
        self.takes_ids = takes_ids
        self.last = (end if takes_ids else middle) + b"\r\n"
        self.tail = b"null" + self.last[1:]
        self.opening_size = len(opening)
        self.openings: dict[int, bytes] = {}

    def chunk_opening(self, size: int) -> bytes | None:
        """Return the first bytes of a whole chunk of `size` bytes, None if it is too long. Keep
        them while they are few.
        """
        if size >= MAX_CHUNK:
            return None
        opening = SIZE_LINE_OF_CHUNK[size] + self.opening
        if len(self.openings) < _MAX_OPENINGS:
            self.openings[size] = opening
        return opening

    def __repr__(self) -> str:
        return f"<EventTemplate {self.opening!r} {self.middle!r} {self.end!r}>"


class EventTemplates:
    """The templates of all streams of a process, `_MAX_TEMPLATES` at most. A new stream begins with
    the latest one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes, bytes, bool], EventTemplate] = {}
        # No event has the form of these two: they are in use until the first event is learned.
        self._latest = {
            takes_ids: EventTemplate(b"\n", b"\n\n\n", b"", takes_ids=False)
            for takes_ids in (False, True)
        }

    def __repr__(self) -> str:
        return f"<EventTemplates {len(self._known)}>"

    def latest(self, *, takes_ids: bool) -> EventTemplate:
        """Return the template that was learned last. A stream of another form learns its own from
        its first events.
        """
        return self._latest[takes_ids]

    def learn(self, event: bytes, *, takes_ids: bool) -> EventTemplate | None:
        """Return the template of an event; None unless it is plain data.

        Plain data is one choice that has not ended and has a text, without usage; with `takes_ids`,
        it has a list of ids as well.
        """
        key = _parts(event, takes_ids)
        if key is None:
            return None
        known = self._known.get(key)
        if known is None:
            if not _is_plain(event, *key[1:]):
                return None
            if len(self._known) >= _MAX_TEMPLATES:  # some engine writes each event in another form
                self._known.clear()
            known = self._known[key] = EventTemplate(*key[:3], takes_ids=takes_ids)
        self._latest[takes_ids] = known
        return known


def _parts(event: bytes, takes_ids: bool) -> tuple[bytes, bytes, bytes, bool] | None:
    """Return the opening, middle and end of an event, and `takes_ids`; None if they are not
    found.
    """
    opening, text = _OPENING.match(event), _TEXT.search(event)
    closing = event.find(b'"', text.end()) if text else -1
    if (
        opening is None
        or closing < 0
        or not event.endswith(END)
        or event.count(b"\n") != 2
        or b"\r" in event
    ):
        return None
    if not takes_ids:
        return opening[0], event[closing:], b"", takes_ids
    ids = _IDS.search(event, closing)
    bracket = event.find(b"]", ids.end()) if ids else -1
    if ids is None or bracket < 0 or event.find(b"[", bracket) >= 0:
        return None
    return opening[0], event[closing : ids.end()], event[bracket:], takes_ids


def _is_plain(event: bytes, middle: bytes, end: bytes, takes_ids: bool) -> bool:
    """Return whether the event with another text and other ids in their places differs in nothing
    but those.

    An event with something that no client may see is never plain.
    """
    text = _TEXT.search(event)
    if text is None or middle.startswith(b'""'):
        return False
    other = event[: text.end()] + _TEST_TEXT.encode() + middle
    if takes_ids:
        other += b",".join([b"%d" % one for one in _TEST_IDS]) + end
    json = event[len(_PREFIX) :]
    if inside.without_inside(json)[0] is not json:
        return False
    try:
        was, now = msgspec.json.decode(json), msgspec.json.decode(other[len(_PREFIX) :])
        (choice,), (changed,) = was["choices"], now["choices"]
        if choice["finish_reason"] is not None or choice.get("logprobs") is not None:
            return False  # those differ in each event
        if was.get("usage") is not None or "error" in was:
            return False
        if "delta" in choice:
            (kind,) = choice["delta"]
            text_was, text_now = choice["delta"].pop(kind), changed["delta"].pop(kind)
        else:
            text_was, text_now = choice.pop("text"), changed.pop("text")
        if takes_ids and (
            not isinstance(choice.pop("token_ids"), list) or changed.pop("token_ids") != _TEST_IDS
        ):
            return False
        return isinstance(text_was, str) and text_now == _TEST_TEXT and was == now
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return False
