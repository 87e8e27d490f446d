"""`python -m tests.browser.screenshots`: pictures of the page of the admin listener for the guide.

On a wall and on a phone, light and dark: docs/images/page-WHERE-SCHEME.png.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import urllib.request
from pathlib import Path

import uvloop
from PIL import Image

from tests.browser.chromium import connected, running
from tests.browser.shown_fleet import shown_fleet

FOLDER = Path(__file__).parents[2] / "docs" / "images"
SIZES = {"wall": (1440, 1560), "phone": (360, 1250)}
COLOURS = 128
"""Of each picture: that keeps them small."""
DRAINED = "[...document.querySelectorAll('#engines .engine')].at(-3).title"
"""An expression: an engine's URL, with its id in brackets."""


async def take(address: str, folder: Path, seconds: float) -> None:
    """Take all with a browser. `seconds`: how long the page is open before."""
    async with shown_fleet() as url, connected(address) as browser:
        page = await browser.page()
        await page.show(*SIZES["wall"], "light")
        await page.open(url)
        await page.until("document.querySelectorAll('#engines .engine').length === 6")
        await page.evaluate("document.documentElement.style.overflow = 'hidden'")  # no scroll bar
        await asyncio.sleep(seconds * 2 / 3)
        name = (await page.evaluate(DRAINED)).partition(" ")[2].partition(")")[0].strip("(")
        drain = urllib.request.Request(f"{url}/admin/v1/engines/{name}/drain", method="POST")
        await asyncio.to_thread(urllib.request.urlopen, drain)
        await asyncio.sleep(seconds / 3)
        for where, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                await page.show(width, height, scheme, phone=where == "phone")
                await asyncio.sleep(1.5)
                await page.evaluate("scrollTo(0, 0)")
                taken = Image.open(io.BytesIO(await page.picture())).convert("RGB")
                small = taken.quantize(
                    COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
                )
                small.save(folder / f"page-{where}-{scheme}.png", optimize=True)
        assert not page.problems, page.problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=FOLDER, help="the folder (default: docs/images)")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the page is open")
    options = parser.parse_args()
    with running() as address:
        uvloop.run(take(address, options.to, options.seconds))
