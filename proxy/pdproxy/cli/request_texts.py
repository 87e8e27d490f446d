"""Texts about requests that `pdproxy requests` and `pdproxy why` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote as escaped

import msgspec

from pdproxy.cli.admin_client import AdminClient, AdminFailed, printable
from pdproxy.observe.recent import KEPT, RUNNING, RecentFailure, RecentRequest


class Listed(msgspec.Struct):
    """What the admin API answers about requests."""

    requests: list[RecentRequest]
    silent_workers: list[int]


def requests_of(client: AdminClient, request_id: str) -> Listed:
    """Return the requests with an id, those that run first, then the newest ones.

    Raises:
        AdminFailed: none is known, or the admin API fails.
    """
    path = f"/requests?id={escaped(request_id, safe='')}"
    found = msgspec.convert(client.ask("GET", path), Listed)
    if not found.requests:
        raise AdminFailed(
            f"no request with the id {printable(request_id)} is known: those that run are, and "
            f"the last {KEPT} that have ended{missing(found.silent_workers)}"
        )
    return found


def missing(silent: Sequence[int]) -> str:
    """Return what to add where workers have not answered."""
    return f"; without worker {', '.join(map(str, silent))}, not answering" if silent else ""


def duration(seconds: float) -> str:
    """Return a duration with three digits at most, or as whole seconds."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"


def heading(request: RecentRequest) -> Iterator[str]:
    """Yield lines with what a request is, and who has sent it."""
    state = (
        f"running ({request.phase}) for {duration(request.total_s)}"
        if request.ended_s is None
        else f"{request.outcome}, {request.status}, {duration(request.total_s)}, ended "
        f"{duration(request.ended_s)} ago"
    )
    yield f"{request.id}: {state}"
    kind = "" if request.stream is None else ", a stream" if request.stream else ", no stream"
    yield f"{request.method} {request.path}, model {request.model or '-'}{kind}"
    known = (("client", request.client), ("key", request.key), ("tenant", request.tenant))
    sender = [f"{name} {value}" for name, value in known if value is not None]
    counts = (
        ("prompt tokens", request.prompt_tokens),
        ("completion tokens", request.completion_tokens),
    )
    numbers = [f"{name} {value}" for name, value in counts if value is not None]
    if sender or numbers:
        yield ", ".join(sender + numbers)


def failure(one: RecentFailure) -> str:
    """Return a failed leg in a sentence."""
    if one.phase == "continued":
        then = "another engine went on" if one.retried else "no other engine went on"
        return f"the stream was cut: {then} ({one.error})"
    then = "tried again" if one.retried else "not tried again"
    return f"{one.phase} at {one.engine} failed, {then}: {one.error}"


def ending(request: RecentRequest) -> str:
    """Return what ended a request."""
    if request.outcome == RUNNING:
        return "it runs"
    why = "" if request.reason is None else f" ({request.reason})"
    error = "" if request.error is None else f": {request.error}"
    return f"ended: {request.outcome}, {request.status}{why}{error}"
