"""What the running proxy says, by its admin API: for how long it has had no request, and what is
wrong or could be better.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

from pdproxy.cli.admin_client import AdminClient, AdminFailed
from pdproxy.settings.schema import Settings

_TIMEOUT = 10.0
REPEATED = 3600.0
"""Seconds after which a sentence is shown again that has come back, or still holds."""
_MOST = 256
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class RunningProxy:
    """Asks it. `settings`: its own."""

    def __init__(self, settings: Settings) -> None:
        self._client = AdminClient.of_settings(settings, _TIMEOUT)

    async def idle(self) -> float:
        """Return for how many seconds it has had no request: infinite if it never had one, 0 if it
        does not answer.
        """
        answer = await self._ask("/requests?limit=1")
        requests = answer.get("requests")
        if not isinstance(requests, list):
            return 0.0
        if not requests:
            return math.inf
        ended = requests[0].get("ended_s")
        return float(ended) if isinstance(ended, (int, float)) else 0.0

    async def details(self) -> list[str]:
        """Return the details of `/ready`; none if it does not answer."""
        details = (await self._ask("/ready", base="")).get("details")
        return [str(one) for one in details] if isinstance(details, list) else []

    async def _ask(self, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = await asyncio.to_thread(self._client.ask, "GET", path, **options)
        except AdminFailed:
            return {}
        return answer if isinstance(answer, dict) else {}


class Said:
    """Which sentences were shown. Their numbers change all the time: another one alone does not
    make a sentence new.
    """

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}

    def new(self, details: list[str], now: float) -> list[str]:
        """Return those to show. `now`: seconds."""
        found = []
        for detail in details:
            key = _NUMBER.sub("0", detail)
            if now - self._shown.get(key, -math.inf) >= REPEATED:
                self._shown.pop(key, None)
                self._shown[key] = now
                found.append(detail)
        while len(self._shown) > _MOST:
            self._shown.pop(next(iter(self._shown)))
        return found
