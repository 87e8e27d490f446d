"""Closing the leg of a decode engine that may wait for KV.

Most engines free a closed request's blocks once its KV has come. Some never do
(`Holder.loses_closed`): their leg stays open until the KV must have come, `KV_GRACE` after the
prefill engine's answer, or until it is known that there will be none.

An engine that has shown nothing of an answer that is not streamed may stand still, and may not have
read the request. One that has is healthy: it is asked before its leg is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from pdproxy.kit.clock import Clock
from pdproxy.serving.kv.custody import Custody, End
from pdproxy.upstream.connection import Leg

KV_GRACE = 1.0
"""Seconds from the prefill engine's answer to the end of its write into the decode engine's
blocks.
"""
HEALTH_GRACE = 1.0
"""Seconds in which an engine that has read the request says that it is healthy."""


def close(leg: Leg, custody: Custody | None) -> None:
    """Close a leg that has shown no data, now or later."""
    if custody is None or not custody.loses_closed:
        leg.close()
    else:
        custody.when_over(partial(leg.let_finish, KV_GRACE))


async def ask_and_close(
    leg: Leg,
    custody: Custody,
    is_alive: Callable[[], Awaitable[bool]],
    clock: Clock,
    *,
    in_silence: bool,
) -> None:
    """Close a leg that has shown no data, once its engine has been asked whether it is healthy. One
    that is frees the KV of the request; otherwise the KV is released.

    `is_alive`: asks it; `in_silence`: see `Custody.end`.
    """
    try:
        with suppress(TimeoutError), clock.within(HEALTH_GRACE):
            if await is_alive():
                custody.end(End.ABORTED, in_silence=in_silence)
    finally:
        close(leg, custody)
        custody.release()
