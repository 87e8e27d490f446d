"""Leases that may have ended before the KV was read, where no notice says so.

A decode engine that has taken a handle renews the lease until it has read the KV. It does not while
it stands still, or while its messages are lost. Then the prefill engine gives the blocks to other
prompts, the decode engine reads those, and nothing fails. So an answer whose first data comes later
than the lease lasts is used only if no handle of the prefill engine has expired since.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from pdproxy.fleet.engine import Engine
from pdproxy.kit.errors import EngineError, OverloadedError
from pdproxy.serving.kv.custody import Custody
from pdproxy.upstream.metrics_page import Scrape


class EndedLeases:
    """Looks at the prefill engines of one pool. `scrape(url)` reads an engine's metrics."""

    def __init__(
        self, engines: Mapping[str, Engine], scrape: Callable[[str], Awaitable[Scrape]]
    ) -> None:
        self._engines = engines
        self._scrape = scrape

    async def may_have(self, custody: Custody) -> bool:
        """Return whether the lease of a handle that was given away may be among those that have
        ended.

        An engine that does not answer, or was started again, shows nothing: then the answer is
        used.
        """
        engine = self._engines.get(custody.prefill)
        if engine is None or engine.in_ledger.run_number != custody.prefill_run:
            return False
        try:
            found = await self._scrape(custody.prefill)
        except (EngineError, OverloadedError):
            return False
        return found.expired is not None and found.expired > custody.expired_before
