"""Notices of engines on their way through a virtual network, in place of ZMQ: where a link is down
they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

from pdproxy_lab.sim.notice_sender import NoticeSender
from tests.chaos.virtual.transport import Link


class VirtualNotices(NoticeSender):
    """The sender of an engine. `arrived` gets each notice in `there`, `link` later, and what is no
    notice, too.
    """

    def __init__(self, link: Link, arrived: Callable[[bytes], None], there: Context) -> None:
        super().__init__("virtual", keeps=False)
        self._link, self._arrived, self._there = link, arrived, there

    def open(self, ranks: int) -> None:
        """Do nothing: there is no connection."""

    def _send(self, payload: bytes, rank: int) -> None:
        self.counts["sent"] += 1

        def arrive() -> None:
            if self._link.down:
                self._link.when_up(arrive, self._there)
            else:
                self._arrived(payload)

        asyncio.get_running_loop().call_later(self._link.latency, arrive, context=self._there)
