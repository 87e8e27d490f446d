"""Counters are read once more behind the end of the time that they are watched for: the check
itself may have stood still.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.check import handles, pairs
from pdproxy.check.handles import Handles
from pdproxy.check.options import CheckOptions
from pdproxy.check.pairs import PairProbe
from pdproxy_lab.conformance import pair_under_test
from pdproxy_lab.conformance.pair_under_test import PairUnderTest

OPTIONS = CheckOptions(settle=1.0, poll=0.0)


class Standing:
    """A process that stands still for a minute behind its first reading; the engine has moved on by
    the second one.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0

    def monotonic(self) -> float:
        return self.now

    async def scrape(self, *_: object) -> Any:
        self.readings += 1
        self.now += 60.0
        done = self.readings > 1
        source = {"external_kv_transfer": 64.0 * done}
        return SimpleNamespace(
            kv_usage=0.0 if done else 0.5,
            external=64.0 * done,
            by_source=source,
            failed_transfers=0,
            busy=not done,
            expired=0,
        )


async def freed(standing: Standing) -> bool:
    return await Handles(None, None, OPTIONS).freed("http://p", 0.0, OPTIONS.settle)  # type: ignore[arg-type]


async def moved(standing: Standing) -> bool:
    before = SimpleNamespace(
        external=0.0, by_source={"external_kv_transfer": 0.0}, failed_transfers=0
    )
    made = SimpleNamespace(_options=OPTIONS, _http=None)
    found, _ = await PairProbe._moved(made, "http://d", before, 64)  # type: ignore[arg-type]
    return found == 64


async def arrived(standing: Standing) -> bool:
    made = SimpleNamespace(
        options=OPTIONS, scraped=standing.scrape, decode=SimpleNamespace(url="http://d")
    )
    before = SimpleNamespace(external=0.0, by_source={"external_kv_transfer": 0.0})
    found = await PairUnderTest.arrived(made, before, 64)  # type: ignore[arg-type]
    return found is not None and found.all == 64


async def usage(standing: Standing) -> bool:
    url = SimpleNamespace(url="http://e")
    made = SimpleNamespace(options=OPTIONS, scraped=standing.scrape, prefill=url, decode=url)
    standing.readings = -1  # it reads two engines at a time
    return (await PairUnderTest.usage(made)).prefill == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize("watched", [freed, moved, arrived, usage])
async def test_a_process_that_stood_still_looks_again(
    watched: Callable[[Standing], Awaitable[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = Standing()
    for module in (handles, pairs, pair_under_test):
        monkeypatch.setattr(module, "time", standing)
    for module in (handles, pairs):
        monkeypatch.setattr(module, "scrape", standing.scrape)
    assert await watched(standing)
