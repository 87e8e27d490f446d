"""What must be true of streams whose engine fails: another engine goes on with them wherever that
is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdproxy.observe.events import StreamContinued
from pdproxy.wire.continuable import NotContinued
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.chaos.clients import Outcome
from tests.chaos.finding import Finding, shortened
from tests.chaos.oracle import CHAT, NAMED, Body
from tests.chaos.soundness import Soundness

_BY_CHANCE = frozenset({NotContinued.N.value, NotContinued.SEED.value})
"""Why nobody goes on with answers that are drawn by chance, or with several of one prompt."""
_BY_STOP = frozenset({NotContinued.STOP_PENDING.value})
"""Why nobody goes on with some that have stop strings."""
_BY_ROUTE = frozenset({NotContinued.ROUTE.value})
"""Why nobody goes on with responses and messages."""
_BY_MEDIA = frozenset({NotContinued.MEDIA.value})
"""Why nobody goes on with chats that have pictures."""
_BY_LETTER = frozenset({NotContinued.REASONING_SEEN.value})
"""Why nobody goes on with some chats of the simulator's engines, which have a parser: at half a
letter it withholds the text, and no engine says whether that is content.
"""
_BY_ENGINES = frozenset(
    {
        NotContinued.NONE_LEFT.value,
        NotContinued.NO_ENGINE.value,
        NotContinued.DEADLINE.value,
        NotContinued.REFUSED.value,
    }
    | {
        NotContinued.RETRY_BUDGET.value,
        NotContinued.HALF_LETTER.value,
        NotContinued.ENGINES_LOST.value,
    }
)
"""Why nobody goes on with any stream: engines fail once more, also at `/detokenize`, or there is
none.
"""


def explained(
    decisions: Iterable[tuple[float, StreamContinued]],
    asked: Mapping[str, Body],
    soundness: Soundness,
    answering: Sequence[str],
) -> list[Finding]:
    """Each stream that ended early ended for a reason that its request and the engines can have.

    `decisions`: each with its time; `asked`: what was asked, by request; `answering`: names of the
    engines that answer clients.
    """
    found = []
    for at, one in decisions:
        body = asked.get(one.request_id)
        if body is None or one.result in ("continued", "finished"):
            continue
        allowed = _BY_ENGINES | (
            _BY_CHANCE if "n" in body.fields else _BY_STOP if "stop" in body.fields else frozenset()
        )
        if body.path in NAMED:
            allowed |= _BY_ROUTE
        if "image" in str(body.fields):
            allowed |= _BY_MEDIA
        if _may_withhold(body):
            allowed |= _BY_LETTER
        if one.reason not in allowed:
            text = f"request {one.request_id} was {one.result}: {one.reason}"
            found.append(Finding("a stream goes on if its request allows it", text))
        elif one.reason == NotContinued.NO_ENGINE.value:
            sound = [name for name in soundness.sound(at, at) if name in answering]
            if sound:
                text = (
                    f"request {one.request_id}: no engine, and nothing is wrong with "
                    f"{', '.join(sound)}"
                )
                found.append(Finding("a stream goes on while an engine is sound", text))
    return shortened(found)


def _may_withhold(body: Body) -> bool:
    """Return whether an event of an answer may hold half a letter: only letters beyond ASCII have
    several tokens.

    The last letter of an answer that ends with its last token may have lacked some: its text has
    fewer tokens then.
    """
    if body.path != CHAT or body.right is None:
        return False
    right, most, encode = body.right, body.fields.get("max_tokens", 0), BuiltInTokenizer().encode
    return any(
        not text.isascii() or (right.ends.get(choice) == "length" and len(encode(text)) < most)
        for choice, text in right.texts.items()
    )


def unbroken(outcomes: Iterable[Outcome], broken: Mapping[str, str]) -> list[Finding]:
    """Each stream of which one engine failed, and nothing else, is complete and right. `broken`:
    what failed, by request.
    """
    return shortened(
        [
            Finding(
                "a stream survives one engine",
                f"request {one.ident}, {broken.get(one.ident)}: {one.how} {one.detail}",
            )
            for one in outcomes
            if one.how != "right"
        ]
    )
