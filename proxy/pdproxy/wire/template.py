"""What the events of one stream have in common: learned from one of them, proven, and then found in others by a few compares.

Nearly all events of a stream are the same JSON with another piece of text and other token ids. Whoever knows what stands around
those two needs no parser, no matter how the engine spaces its JSON or which fields it writes. A model's text cannot pass for what
stands around it: a quote in it is escaped, and `middle` begins with the text's closing quote.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire.sse import END

_PREFIX = b"data: "
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"')
_IDS = re.compile(rb'"token_ids": ?\[')
_PROBE, _PROBE_IDS = "a text that no model was asked for", [20011, 3]


class Template(msgspec.Struct, frozen=True):
    """An event of plain data is `prefix`, a text as JSON writes it, `middle`, and then, if ids are taken, the ids and `end`.

    `prefix` ends with the text's opening quote, `middle` begins with its closing one. With ids, `middle` ends with `[`, `end`
    begins with `]`; without, `end` is empty and `middle` goes to the event's end.
    """

    prefix: bytes
    middle: bytes
    end: bytes

    @classmethod
    def learn(cls, event: bytes, *, takes_ids: bool) -> Template | None:
        """Return the template of an event; None unless it is plain data.

        Plain is one choice that has not ended and has text, and no usage; with `takes_ids`, a list of ids as well.
        """
        if not (event.startswith(_PREFIX) and event.endswith(END) and event.count(b"\n") == 2 and b"\r" not in event):
            return None
        opening = _TEXT.search(event)
        closing = event.find(b'"', opening.end()) if opening else -1
        if opening is None or closing < 0:
            return None
        middle, end = event[closing:], b""
        if takes_ids:
            ids = _IDS.search(event, closing)
            bracket = event.find(b"]", ids.end()) if ids else -1
            if ids is None or bracket < 0:
                return None
            middle, end = event[closing : ids.end()], event[bracket:]
        found = cls(event[: opening.end()], middle, end)
        return found if middle[1:2] != b'"' and found._holds(event, takes_ids) else None

    def _holds(self, event: bytes, takes_ids: bool) -> bool:
        """Prove it: with another text and other ids in their places, the event says the same but for those."""
        other = self.prefix + _PROBE.encode() + self.middle
        if takes_ids:
            other += b",".join(b"%d" % one for one in _PROBE_IDS) + self.end
        try:
            was, now = msgspec.json.decode(event[len(_PREFIX) :]), msgspec.json.decode(other[len(_PREFIX) :])
            (choice,), (probed,) = was["choices"], now["choices"]
            holder = "text" if "text" in choice else "delta"
            if choice["finish_reason"] is not None or was.get("usage") is not None or "error" in was:
                return False
            if holder == "delta":
                (kind,) = choice["delta"]
                text, probe = choice["delta"].pop(kind), probed["delta"].pop(kind)
            else:
                text, probe = choice.pop("text"), probed.pop("text")
            if takes_ids and (not isinstance(choice.pop("token_ids"), list) or probed.pop("token_ids") != _PROBE_IDS):
                return False
            return isinstance(text, str) and probe == _PROBE and was == now
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
            return False
