"""Reports what is refused before it is a request: for its key, its head, its body, or since connections or space are missing.

Owns the reason of each such refusal: a metric's label, and a field of a log line.
"""

from __future__ import annotations

from pdproxy.kit.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ForbiddenError,
    HeadTimeoutError,
    HeadTooLargeError,
    OverloadedError,
    PathTooLongError,
    PdproxyError,
    Reason,
    RevokedError,
    TooManyConnectionsError,
    UnauthorizedError,
)
from pdproxy.observe.events import Observers, Refused

_REASONS: tuple[tuple[type[PdproxyError], str], ...] = (
    (RevokedError, "ended_key"),
    (ForbiddenError, "not_allowed"),
    (BodyTooLargeError, "body_too_large"),
    (BodyTimeoutError, "body_slow"),
    (HeadTooLargeError, "head_too_large"),
    (HeadTimeoutError, "head_slow"),
    (PathTooLongError, "path_too_long"),
    (TooManyConnectionsError, "connections"),
    (OverloadedError, "no_space"),
)


def reason_of(error: PdproxyError) -> str:
    """Return the reason of a refusal: one of `catalog_refusals.REFUSED`."""
    if error.reason is Reason.WRONG_KEYS:
        return "wrong_key"
    if isinstance(error, RevokedError) and error.what == "certificate":
        return "certificate"
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    if isinstance(error, UnauthorizedError):
        return "no_key" if error.code is None else "wrong_key"
    return "bad_http"


def report_refusal(observers: Observers, error: PdproxyError, client: str) -> None:
    """Report a refusal of a client's request or connection. `client`: its address."""
    observers.notify(Refused(reason_of(error), client, None if error.reason is None else error.reason.value))
