"""Reports what is refused before it is a request: for its key, its head, its body, or since
connections or space are missing.

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
    RefusalReason,
    RevokedError,
    TooManyConnectionsError,
    UnauthorizedError,
)
from pdproxy.observe.description import Label, counter
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
REFUSED = (
    ("no_key", "no API key was sent, and one is required"),
    ("wrong_key", "the API key is none of the valid ones"),
    ("ended_key", "the API key has expired, or was taken away while the request was read"),
    (
        "not_allowed",
        (
            "the API key is not good for that route or tenant, or a page of another site asks the "
            "admin API"
        ),
    ),
    ("certificate", "the client's certificate is not valid any more"),
    ("connections", "too many connections are open"),
    ("body_too_large", "the body is larger than limits.max_body_bytes"),
    ("body_slow", "the body was not complete in deadlines.client_body"),
    ("no_space", "no space for the body: limits.max_buffered_bytes"),
    ("head_too_large", "the head is larger than limits.max_header_bytes"),
    ("head_slow", "the head was not complete in deadlines.client_head"),
    ("path_too_long", "the path is longer than that of any route"),
    ("bad_http", "what came is not a valid HTTP request"),
)
EARLY_REFUSALS = counter(
    "pdproxy_early_refusals_total",
    "refusals",
    "Requests and connections that were refused before their body was complete, and requests "
    "without a valid key",
    Label("reason", REFUSED),
    of=Refused,
)


def reason_of(error: PdproxyError) -> str:
    """Return the reason of a refusal: one of `REFUSED`."""
    if error.reason is RefusalReason.WRONG_KEYS:
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
    observers.notify(
        Refused(reason_of(error), client, None if error.reason is None else error.reason.value)
    )
