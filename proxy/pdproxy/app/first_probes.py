"""The first round of probes: requests that come before it would be refused although all engines are up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from pdproxy.app.compose import Proxy
from pdproxy.app.signals import Ending
from pdproxy.fleet.dns_source import DnsSource

LOOK_EVERY = 0.01
"""Seconds between two looks whether the engines were probed."""


async def first_probes(proxy: Proxy, names: Sequence[DnsSource], ending: Ending) -> None:
    """Wait until all engines were probed, also those that DNS names, and until it is known who has registered.

    For no longer than two probes may take, and not once the end was asked for. A name that can't be answered is not waited for.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * proxy.settings.deadlines.probe):
            await _probed(proxy, names, ending)


async def _probed(proxy: Proxy, names: Sequence[DnsSource], ending: Ending) -> None:
    registered = [pool.registrations.known for pool in proxy.pools if pool.registrations is not None]
    while not (
        all(name.counts for name in names)
        and all(node.probed for pool in proxy.pools for node in pool.ledger.nodes)
        and all(one.complete for one in registered)
    ):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY):
                await ending.requested.wait()
                return
