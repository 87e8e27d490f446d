"""One engine prefills and decodes by itself."""

from __future__ import annotations

from collections.abc import Awaitable

from pdproxy.serving.dispatch.attempt import Attempt, Order
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy.serving.dispatch.recovery import Outcome


def serve(attempt: Attempt) -> Awaitable[Outcome | None]:
    """Have the engine serve the whole request."""
    return DecodeLeg(attempt).run()


ORDER = Order(roles=(), stages=(serve,))
