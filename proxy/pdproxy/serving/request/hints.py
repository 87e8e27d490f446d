"""Reads what a client says in headers that are for the proxy itself. Values of `X-PDProxy-...` that
can't be used are refused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence

from pdproxy.kit.errors import BadRequestError
from pdproxy.scheduling.slo import Slo
from pdproxy.serving.dispatch.hints import Hints

logger = logging.getLogger("pdproxy")

SLO_TTFT, SLO_TPOT, SLO_GAP = (
    b"x-pdproxy-slo-ttft-ms",
    b"x-pdproxy-slo-tpot-ms",
    b"x-pdproxy-slo-gap-ms",
)
DECISION = b"x-pdproxy-decision"
"""As a request's header it asks for the answer's header of this name."""
TIMING = b"x-pdproxy-timing"
"""It asks for the answer's header Server-Timing."""
TIMEOUT = b"x-request-timeout"
"""Seconds within which the client wants its answer. The name that other proxies use."""
HINTS = frozenset({SLO_TTFT, SLO_TPOT, SLO_GAP, DECISION, TIMING, TIMEOUT})
_NAMES = {
    SLO_TTFT: "X-PDProxy-SLO-TTFT-MS",
    SLO_TPOT: "X-PDProxy-SLO-TPOT-MS",
    SLO_GAP: "X-PDProxy-SLO-Gap-MS",
    DECISION: "X-PDProxy-Decision",
    TIMING: "X-PDProxy-Timing",
}
_NUMBER = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_SECONDS = re.compile(rb"[0-9]{1,18}(\.[0-9]{0,9})?")
_MOST_MS = 604_800_000
"""A week, as for all times in the settings."""
MAX_SESSION = 256
"""Characters of a session's name. What follows makes no other session."""
_NOBODY = frozenset({b"", b"null", b'""'})


def noted(*session_headers: str | None) -> frozenset[bytes]:
    """Return the headers that are read, in lower case. `session_headers`: those that name a
    session, None where none does.
    """
    return HINTS | {
        header.lower().encode("latin-1") for header in session_headers if header is not None
    }


def session_in(lines: Sequence[tuple[bytes, bytes]], fields: Mapping[str, bytes]) -> str | None:
    """Return what names a conversation, for the choice of a pool: a header that is none of `HINTS`,
    or the body's `user`.
    """
    named = next((value for name, value in lines if name not in HINTS), b"")
    return named[:MAX_SESSION].decode("latin-1") or user_in(fields)


def user_in(fields: Mapping[str, bytes]) -> str | None:
    """Return the `user` of a body as its JSON, at a bounded length; None if it names nobody."""
    user = bytes(memoryview(fields.get("user", b""))[:MAX_SESSION])
    return None if user in _NOBODY else user.decode("latin-1")


def read_hints(lines: Sequence[tuple[bytes, bytes]], session_header: str | None) -> Hints:
    """Return what a request's headers say. Of a header that came twice, the first one counts.

    Raises:
        BadRequestError: a value that can't be used; the message names the header, and quotes
            nothing.
    """
    found = dict(reversed([*lines]))
    ttft, tpot, gap = [_seconds(found, name) for name in (SLO_TTFT, SLO_TPOT, SLO_GAP)]
    slo = Slo(ttft, tpot, gap)
    return Hints(
        slo=slo or None,
        session=session_of(session_header, found),
        wants_decision=_flag(found, DECISION),
        wants_timing=_flag(found, TIMING),
    )


def timeout_of(lines: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds within which a client wants its answer, from its complete request on; None
    if it does not say so.

    What is no number of seconds (`30s`) is ignored: other servers read the header otherwise, and
    vLLM reads none.
    """
    value = next((value for name, value in lines if name == TIMEOUT), None)
    if value is None:
        return None
    text = value.strip(b" \t")
    if not _SECONDS.fullmatch(text):
        logger.info(
            "X-Request-Timeout is ignored: it is not a number of seconds, such as 30 or 0.5"
        )
        return None
    return float(text)


def session_of(session_header: str | None, found: Mapping[bytes, bytes]) -> str | None:
    """Return the session that a request's headers name, None if they name none. `session_header`:
    as above.
    """
    if session_header is None:
        return None
    return (
        found.get(session_header.lower().encode("latin-1"), b"")[:MAX_SESSION].decode("latin-1")
        or None
    )


def _seconds(found: dict[bytes, bytes], name: bytes) -> float | None:
    value = found.get(name)
    if value is None:
        return None
    text = value.strip(b" \t")
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < number <= _MOST_MS:
        raise BadRequestError(
            f"{_NAMES[name]}: expected milliseconds, above 0 and up to {_MOST_MS}",
            param=_NAMES[name],
        )
    return number / 1000


def _flag(found: dict[bytes, bytes], name: bytes) -> bool:
    value = found.get(name, b"0").strip(b" \t")
    if value not in (b"0", b"1"):
        raise BadRequestError(f"{_NAMES[name]}: expected 1 or 0", param=_NAMES[name])
    return value == b"1"
