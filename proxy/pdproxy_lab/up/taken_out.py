"""One engine is taken out of use and given back, by the proxy's admin API. It is written down while
it is out, so that the next `up` gives back what a killed one has left out.
"""

from __future__ import annotations

import contextlib
import sys

from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.program import run
from pdproxy_lab.up.state import Folder

PDPROXY = (sys.executable, "-m", "pdproxy")
DRAIN = 600.0
"""Seconds until the engine must have ended its requests, and until it must be used again."""
_EXTRA = 30.0
"""Seconds for the command that waits for it to begin and end."""
_MAX_URL = 4096


async def take_out(url: str, folder: Folder) -> None:
    """Have the proxy send an engine no more requests, and wait until it has ended those that it
    has.

    Raises:
        UpError: it can't be; it is used on.
    """
    folder.taken_out.write_text(url)
    try:
        await _order("drain", url, folder)
    except UpError:
        with contextlib.suppress(UpError):  # it may be on its way out
            await _order("undrain", url, folder)
        folder.taken_out.unlink(missing_ok=True)
        raise


async def give_back(url: str, folder: Folder) -> None:
    """Have the proxy use an engine again.

    Raises:
        UpError: it is not used in time.
    """
    await _order("undrain", url, folder)
    folder.taken_out.unlink(missing_ok=True)


async def give_back_left(folder: Folder) -> str | None:
    """Have the proxy use again what an earlier `up` has left out. Return its URL, None: nothing
    was.
    """
    try:
        url = folder.taken_out.read_text()[:_MAX_URL].strip()
    except OSError:
        return None
    await give_back(url, folder)
    return url


async def _order(action: str, url: str, folder: Folder) -> None:
    command = [*PDPROXY, "engines", action, url, "--config", str(folder.settings)]
    wait = ["--wait", "--wait-for", f"{DRAIN:g}"]
    ended = await run([*command, *wait], DRAIN + _EXTRA, f"pdproxy engines {action}")
    if ended.code:
        said = ended.err.decode("utf-8", "replace").strip()
        raise UpError(f"{url} can't be {action}ed: {said}")
