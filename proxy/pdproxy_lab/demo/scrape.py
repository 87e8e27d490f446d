"""Reads the metrics of the proxy and of its engines over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from pdproxy_lab.demo.figures import ENGINE_NAMES, PROXY_NAMES, ShownEngine
from pdproxy_lab.demo.pages import Page, parse

DEADLINE = 2.0
"""Seconds for one page."""


async def scrape(
    session: aiohttp.ClientSession, proxy: str, places: Sequence[ShownEngine]
) -> tuple[Page | None, dict[str, Page | None]]:
    """Return the proxy's page, and each engine's by URL; None if there was no valid answer in
    time.
    """
    asked = [
        _page(session, proxy, PROXY_NAMES),
        *(_page(session, place.url, ENGINE_NAMES) for place in places),
    ]
    own, *engines = await asyncio.gather(*asked)
    return own, {place.url: page for place, page in zip(places, engines, strict=True)}


async def _page(session: aiohttp.ClientSession, url: str, names: Sequence[str]) -> Page | None:
    try:
        async with asyncio.timeout(DEADLINE), session.get(f"{url}/metrics") as answer:
            return parse(await answer.text(), names) if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
