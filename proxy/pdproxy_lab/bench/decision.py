"""What pdproxy says of the engines that it chose for a request: the header X-PDProxy-Decision.
Pure.

The header is `whole URL; reason=R; name=value` or `split URL -> URL; reason=R; ...`. Other servers
send none; what has another form is no decision.
"""

from __future__ import annotations

import re

import msgspec

HEADER = "x-pdproxy-decision"
ASKED = {HEADER: "1"}
"""The header of a request that asks for the answer's header of the same name."""
MAX_LENGTH = 1000
"""Characters that are kept of it."""
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?(e-[0-9]{1,2})?")


class Decision(msgspec.Struct, frozen=True):
    """What was chosen (`whole`, `split`), and why. `ttft`: the time until the first token that was
    predicted, in seconds; None: nothing was.
    """

    choice: str
    reason: str
    ttft: float | None = None


def decision_of(header: str) -> Decision | None:
    """Read the header's value. None: it has no choice, or no reason."""
    first, *named = header.split("; ")
    choice = first.partition(" ")[0]
    values = dict(part.partition("=")[::2] for part in named)
    reason, ttft = values.get("reason", ""), values.get("ttft", "")
    if not _WORD.fullmatch(choice) or not _WORD.fullmatch(reason):
        return None
    return Decision(choice, reason, float(ttft) if _SECONDS.fullmatch(ttft) else None)
