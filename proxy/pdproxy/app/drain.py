"""The order in which a proxy stops: no new requests, the end of those in flight, then the release
of their KV.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from pdproxy.deciding.turns import PoolTurns
from pdproxy.kit.errors import Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.admission import Admission
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.settings.limits import Deadlines

logger = logging.getLogger("pdproxy")

MARGIN = 10.0
"""Seconds behind all deadlines of a drain until a worker that is still there is killed."""


async def drain(
    requests: Collection[asyncio.Task[object]],
    admission: Admission,
    kept: Sequence[tuple[Custodian, OpenTurns | None, PoolTurns | None]],
    timeout: float,
    observers: Observers,
) -> None:
    """Refuse new requests, wait for those in flight, cut off what is left at the deadline, and wait
    until all KV is released.

    `kept`: who keeps the KV of each pool. `timeout`: seconds for the requests in flight. The
    custodian decides how long the release of KV may take.
    """
    try:
        async with asyncio.timeout(timeout):
            await admission.close()
    except TimeoutError:
        observers.notify(DeadlinePassed(Wait.DRAIN.value))
        logger.warning("%d requests were cut off after %g s", admission.inflight, timeout)
        left = list(requests)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    await asyncio.gather(*(_release(*one) for one in kept))


def longest_drain(deadlines: Deadlines, linger: float = 0.0) -> float:
    """Return within how many seconds a worker that lingers and drains must have ended: each wait of
    a drain has a deadline.
    """
    release = (
        deadlines.abandoned_prefill + deadlines.prefill + deadlines.kv_ready + deadlines.first_token
    )
    return linger + deadlines.drain + release + deadlines.release + MARGIN


async def _release(
    custodian: Custodian, open_turns: OpenTurns | None, turns: PoolTurns | None
) -> None:
    if lost := await custodian.settle(custodian.drain_timeout):
        logger.warning("%d prefills and handles did not end in %g s", lost, custodian.drain_timeout)
    if open_turns is not None:
        open_turns.drop_all()
    if turns is not None and (left := await turns.close(custodian.drain_timeout)):
        logger.warning("KV of %d turns is left to the decode engines' own time", left)
