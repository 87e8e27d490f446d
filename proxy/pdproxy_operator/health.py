"""Where the operator says how it is: /health, /ready and /metrics."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pdproxy.app.listening import listen
from pdproxy.app.own_listener import OwnListener, own_bounds
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.settings.errors import SettingsError
from pdproxy.web.guard import GuardedProtocol

MAX_CONNECTIONS, WRITE_SECONDS, KEEP_ALIVE = 64, 30.0, 75
"""Connections at once; seconds for which an answer may stay unread, and for which an idle
connection is kept.
"""
MAX_UNREAD = 4 << 20
"""Bytes of answers that are not read yet."""


class Answer(NamedTuple):
    """An answer: its status with its text."""

    status: int
    text: bytes | str


def health_listener(answers: Mapping[str, Callable[[], Answer]]) -> OwnListener:
    """Return what answers GET requests. `answers`: by their paths."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        found = answers.get(scope["path"], lambda: Answer(404, "not found\n"))()
        if scope["method"] not in ("GET", "HEAD"):
            found = Answer(405, "method not allowed\n")
        await PlainTextResponse(found.text, found.status)(scope, receive, send)

    observers = Observers([])
    bounds = own_bounds(
        Clock(),
        observers,
        connections=MAX_CONNECTIONS,
        write_seconds=WRITE_SECONDS,
        max_unread=MAX_UNREAD,
    )
    made = {"bounds": bounds, "observers": observers, "__slots__": ()}
    protocol = type("HealthProtocol", (GuardedProtocol,), made)
    return OwnListener(answer, protocol, keep_alive=KEEP_ALIVE)


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        SettingsError: it can't be had.
    """
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"--listen: can't listen on {host}:{port}: {why}") from None
