"""What pdproxy says of the engines that it chose for a request: the header X-PDProxy-Decision.
Pure.

The header is `whole URL; reason=R; name=value` or `split URL -> URL; reason=R; ...`. Other servers
send none; what has another form is no decision.
"""

from __future__ import annotations

import re

HEADER = "x-pdproxy-decision"
ASKED = {HEADER: "1"}
"""The header of a request that asks for the answer's header of the same name."""
MAX_LENGTH = 1000
"""Characters that are kept of it."""
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,32}")


def parts_of(decision: str) -> tuple[str, str] | None:
    """Return what was chosen (`whole`, `split`) and the reason. None: it does not say so."""
    choice, *named = decision.split("; ")
    choice = choice.partition(" ")[0]
    reason = next((one[7:] for one in named if one.startswith("reason=")), "")
    return (choice, reason) if _WORD.fullmatch(choice) and _WORD.fullmatch(reason) else None
