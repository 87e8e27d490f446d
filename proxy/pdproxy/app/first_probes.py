"""The first round of probes: requests that come before it would be refused although all engines are
up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pdproxy.app.compose import Proxy
from pdproxy.app.signals import Ending

LOOK_EVERY = 0.01
"""Seconds between two looks whether the engines were probed."""


async def sources_found(proxy: Proxy, ending: Ending, most: float | None = None) -> None:
    """Wait until all sources of engines have answered once, also that nothing could be found out.
    `most`: see `first_probes`.
    """
    await _until(lambda: all(one.counts for one in proxy.sources.found), proxy, ending, most)


async def first_probes(
    proxy: Proxy,
    ending: Ending,
    most: float | None = None,
    has_members: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until all engines were probed, also those that sources find, and until it is known who
    has registered.

    For `most` seconds, None: for no longer than two probes may take; and not once the end was asked
    for. A source is waited for until its first answer, also if nothing could be found out.
    `has_members`: returns whether the proxy has all engines that it is to begin with.
    """
    registered = [
        pool.registrations.known for pool in proxy.pools if pool.registrations is not None
    ]
    await _until(
        lambda: (
            has_members()
            and all(one.counts for one in proxy.sources.found)
            and all(engine.probed for pool in proxy.pools for engine in pool.ledger.engines)
            and all(one.complete for one in registered)
        ),
        proxy,
        ending,
        most,
    )


async def _until(
    is_known: Callable[[], bool], proxy: Proxy, ending: Ending, most: float | None
) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * proxy.settings.deadlines.probe if most is None else most):
            while not is_known():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await ending.requested.wait()
                        return
