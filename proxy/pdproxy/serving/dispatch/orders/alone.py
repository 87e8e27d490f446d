"""One engine prefills and decodes by itself."""

from __future__ import annotations

from pdproxy.serving.dispatch.attempt import Attempt, Order
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy.serving.dispatch.recovery import Outcome


async def serve(attempt: Attempt) -> Outcome | None:
    """Have the engine serve the whole request."""
    return await DecodeLeg(attempt).run()


ORDER = Order(roles=(), stages=(serve,))
