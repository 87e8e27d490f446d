"""The order in which a proxy stops: no new requests, the end of those in flight, then the release of their KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from pdproxy.kit.errors import Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.serving.kv.custody import Custodian
from pdproxy.serving.request.admission import Admission
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract

logger = logging.getLogger("pdproxy")


async def drain(
    requests: Collection[asyncio.Task[object]],
    admission: Admission,
    custodian: Custodian,
    contract: Contract,
    deadlines: Deadlines,
    observers: Observers,
) -> None:
    """Refuse new requests, wait for those in flight, cut off what is left at the deadline, and wait until all KV is released."""
    try:
        async with asyncio.timeout(deadlines.drain):
            await admission.close()
    except TimeoutError:
        observers.notify(DeadlinePassed(Wait.DRAIN.value))
        logger.warning("%d requests were cut off after %g s", admission.inflight, deadlines.drain)
        left = list(requests)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    timeout = deadlines.abandoned_prefill + deadlines.release
    if contract.ends_whole:  # closing such a prefill would end its engine's process
        timeout = deadlines.prefill + deadlines.kv_ready + deadlines.first_token
    if lost := await custodian.settle(timeout):
        logger.warning("%d prefills and handles did not end in %g s", lost, timeout)
