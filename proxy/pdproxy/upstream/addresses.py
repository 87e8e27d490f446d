"""The addresses of an engine's name: which one the next connection goes to, and when the name is
resolved anew.

Owns the resolving of one name. New connections take its addresses in turn. An address that takes no
connection is left out for a while, unless it is the only one left. The name is resolved anew from
time to time while the engine is used, and after a connection that failed; connections to addresses
that it has lost are not used again. An engine stays one engine, however many addresses it has. A
URL with an address in it is never resolved.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence

from pdproxy.kit.addresses import read_address

logger = logging.getLogger("pdproxy")

REFRESH = 30.0
"""Seconds after which a name that is in use is resolved anew: what is common for the records of
services that move.
"""
PAUSE = 1.0
"""Seconds between two resolvings of one name at least, however many connections fail."""
LEFT_OUT = 10.0
"""Seconds for which an address that took no connection is left out."""
MAX_ADDRESSES = 16
"""Addresses of a name that count; the first ones."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host for TCP connections to a port. Raises OSError if there are
none.
"""


async def by_system(host: str, port: int) -> list[str]:
    """Return what the system's resolver knows, in a thread.

    Raises:
        OSError: the name is unknown, or its servers do not answer.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # engines may name anything
        raise OSError(f"no name: {error}") from None
    return [str(address[0]) for *_, address in found]


class Addresses:
    """The addresses of one host. `changed` is called when it has lost or got some. Belongs to one
    event loop.
    """

    def __init__(
        self, host: str, port: int, changed: Callable[[], None], resolve: Resolve = by_system
    ) -> None:
        self.host = host
        self.due = math.inf if read_address(host) is not None else -math.inf
        """When the name is to be resolved anew, in seconds of the loop's time."""
        self._port = port
        self._changed = changed
        self._resolve = resolve
        self._known: list[str] = [host] if self.is_fixed else []
        self._left_out: dict[str, float] = {}
        """Until when."""
        self._turn = -1
        self._resolved_at = -math.inf
        self._resolving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Addresses of {self.host}: {', '.join(self._known)}>"

    @property
    def is_fixed(self) -> bool:
        """Whether the host is an address."""
        return self.due == math.inf

    def __contains__(self, address: str) -> bool:
        return address in self._known

    async def in_turn(self) -> tuple[list[str], list[str]]:
        """Return the addresses for the next connection in the order of their turn, and those that
        are left out.

        The first list is never empty.

        Raises:
            OSError: the name has no addresses.
        """
        if self.is_fixed:
            return self._known, []
        if not self._known:
            await asyncio.shield(self._begin())
        now = asyncio.get_running_loop().time()
        self._turn = (self._turn + 1) % len(self._known)
        turned = self._known[self._turn :] + self._known[: self._turn]
        usable = [one for one in turned if self._left_out.get(one, now) <= now]
        others = sorted(
            (one for one in turned if one not in usable), key=self._left_out.__getitem__
        )
        return (usable, others) if usable else (others, [])

    def took(self, address: str) -> None:
        """An address has taken a connection."""
        self._left_out.pop(address, None)

    def failed(self, address: str) -> None:
        """An address has taken no connection: leave it out, and ask for the name's addresses
        again.
        """
        if not self.is_fixed:
            self._left_out[address] = asyncio.get_running_loop().time() + LEFT_OUT
            self.due = self._resolved_at + PAUSE
            self.refresh()

    def refresh(self) -> None:
        """Resolve the name anew if that is due, beside whatever goes on."""
        if asyncio.get_running_loop().time() >= self.due:
            self._begin()

    def close(self) -> None:
        """End what is under way."""
        if self._resolving is not None:
            self._resolving.cancel()

    def _begin(self) -> asyncio.Task[None]:
        """Resolve the name, once at a time: a resolver that hangs holds one thread."""
        if self._resolving is None:
            self._resolving = asyncio.get_running_loop().create_task(
                self._renew(), name=f"resolve:{self.host}"
            )
            self._resolving.add_done_callback(self._over)
        return self._resolving

    async def _renew(self) -> None:
        found = list(dict.fromkeys(await self._resolve(self.host, self._port)))[:MAX_ADDRESSES]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "the name has no addresses")
        before, self._known = self._known, found
        if before and set(before) != set(found):
            logger.info("%s has other addresses now: %s", self.host, ", ".join(found))
            self._left_out = {one: until for one, until in self._left_out.items() if one in found}
            self._changed()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._resolving = None
        self._resolved_at = asyncio.get_running_loop().time()
        self.due = self._resolved_at + REFRESH
        if not task.cancelled() and (error := task.exception()) is not None:
            self.due = self._resolved_at + PAUSE
            if self._known:
                logger.info(
                    "%s does not resolve: %s; its last addresses stay in use",
                    self.host,
                    type(error).__name__,
                )
