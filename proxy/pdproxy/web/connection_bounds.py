"""The limits of every connection of a client: constants, and values from the settings. Set once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdproxy.kit.errors import BadRequestError
from pdproxy.serving.access.clients import Clients
from pdproxy.web.connections import Connections
from pdproxy.web.slow_readers import SlowReaderPolicy
from pdproxy.web.unread_answers import UnreadAnswers

LINGER = 2.0
"""Seconds for a refused client to read the answer, and to stop sending."""
MAX_UNSENT = 4096
"""Bytes that wait for a client before its engine's leg is paused. With one more read of uvloop, up
to 256 KiB may wait.
"""
MAX_PIPELINED = 64
"""Requests that may wait behind another on one connection. One read of the socket can hold
thousands, each of which costs kilobytes: those beyond are not read, and the connection closes after
the last answer.
"""
MAX_REFUSED = 32
"""Connections beyond `limits.max_connections` that may get an error at a time. Others are dropped:
they hold open files.
"""
MAX_PATH = 512
"""Bytes of a request's path, without its query: a route has 50. uvicorn replaces the escapes in it,
at 0.3 us each.
"""
MAX_PARTS, MIN_PART = 65_536, 64
"""Parts of any size in which a body may come. More parts must have `MIN_PART` bytes on average:
each costs 0.3 us.
"""


@dataclass(slots=True)
class ConnectionBounds:
    """Limits from the settings: seconds for a head, seconds over which a body's speed counts, bytes
    of a head. And the shared counts of connections.
    """

    head_timeout: float
    body_timeout: float
    max_header_bytes: int
    slow_readers: SlowReaderPolicy
    clients: Clients
    connections: Connections
    unread_answers: UnreadAnswers
    min_send_rate: float = math.inf
    """Bytes per second of a body that is not complete within `body_timeout`. Infinity: each must
    be.
    """
    longest_body: float = math.inf
    """Seconds for a whole body."""
    leaving: bool = False
    """Whether the process is about to stop: answers that begin from now on close their
    connections.
    """


def small_parts_error() -> BadRequestError:
    """Return the error for a body that comes in too many parts which are too small."""
    message = (
        f"The body comes in more than {MAX_PARTS} parts of less than {MIN_PART} bytes: send "
        f"larger chunks"
    )
    return BadRequestError(message, param="body")
