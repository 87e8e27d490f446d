"""Where another engine may go on with an answer: behind which of its ids, and what of their text
the client has not got.

An engine sends the text of whole letters only, and holds text back that may begin a stop string.
The engine that goes on begins its text behind the ids that it is given. So these must end with a
whole letter, and the client gets what was held back.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from pdproxy.transfer.continued_events import LastEvent
from pdproxy.wire.continuable import Continuable, NotContinued

_MAX_PARTS = 4
"""Ids that one letter may be made of: it has as many bytes."""
_WINDOW = 24
"""Ids at the end of an answer whose text is asked for, besides the ids of text that is held
back.
"""
_IDS_PER_CHARACTER = 4
_REPLACEMENT = "\ufffd"

Detokenize = Callable[[Sequence[int]], Awaitable[str | None]]
"""Returns the text of ids, None if it can't be had."""


class Cut(msgspec.Struct, frozen=True):
    """Where an engine goes on: behind `done` ids. `held`: the text of these that the client has not
    got.
    """

    done: int
    held: str = ""


async def find_cut(
    ids: array[int],
    last: LastEvent,
    kept: Continuable,
    detokenize: Detokenize,
    *,
    is_parsed: bool = False,
) -> Cut | NotContinued:
    """Return where another engine goes on behind `ids`, whose last ones came with the event `last`;
    or why none can.

    `is_parsed`: a parser of the engine makes the events, which may send the text of an id later.
    """
    count = len(ids)
    if not count:
        return NotContinued.NO_IDS if last.text else Cut(0)
    longest = max(map(len, kept.stops), default=1)
    if longest == 1 and last.ids == 1 and last.text and not is_parsed:
        return Cut(count)  # an id whose text has been sent ends a letter
    window = min(count, _WINDOW + _IDS_PER_CHARACTER * longest + len(last.text))
    for back in range(min(_MAX_PARTS, count)):
        text = await detokenize(ids[count - window : count - back])
        if text is None:
            return NotContinued.HALF_LETTER
        if not text.endswith(_REPLACEMENT):
            found = _behind(text, count - back, last, kept, whole=window == count)
            # With an id at the end of a letter comes text, if more is there than is held back: a
            # special token has none, and what is held back can't be told from its name.
            is_special = (
                not back and kept.held_back and not last.text and len(text) > kept.held_back
            )
            return NotContinued.HALF_LETTER if is_special else found
    return Cut(0) if count < _MAX_PARTS and not last.text else NotContinued.HALF_LETTER


def _behind(
    text: str, done: int, last: LastEvent, kept: Continuable, *, whole: bool
) -> Cut | NotContinued:
    """Return the cut behind `done` ids, whose text is `text`, or ends with it if that is not the
    `whole` text.
    """
    held_back = kept.held_back
    if len(text) < held_back and not whole:
        return NotContinued.HALF_LETTER
    if whole and not last.text and 0 < len(text) <= held_back and not kept.shows_ids:
        return Cut(0)  # nothing was sent: a tokenizer may leave a space out where it begins
    if _begins_stop(text, kept.stops):
        return NotContinued.STOP_PENDING
    sent = text[: max(len(text) - held_back, 0)]
    if not sent.endswith(last.text) and (whole or not last.text.endswith(sent)):
        return NotContinued.HALF_LETTER  # the ids do not stand for what was sent
    return Cut(done, text[len(sent) :])


def _begins_stop(text: str, stops: Sequence[str]) -> bool:
    """Return whether the end of a text is the beginning of a stop string."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
