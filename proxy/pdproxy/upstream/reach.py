"""Connections of aiohttp to engines go to no other address than an engine may have.

The address is looked at when its socket is made: whatever a name resolves to by then, and whoever
has sent the name.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from functools import partial

import aiohttp

from pdproxy.kit.engine_networks import EngineNetworks


class NotAllowedError(OSError):
    """No engine may be at this address."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(errno.EACCES, f"{address} is {why}")


def check(networks: EngineNetworks, address: str) -> None:
    """Raise NotAllowedError for an address at which no engine may be."""
    if (why := networks.why_not(address)) is not None:
        raise NotAllowedError(address, why)


def connector(
    networks: EngineNetworks, *, force_close: bool = False
) -> Callable[[], aiohttp.BaseConnector]:
    """Return what makes connectors without a limit. `force_close`: whether a connection is used for
    one request only.
    """

    def opened(where: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = where
        check(networks, str(address[0]))
        return socket.socket(family, kind, protocol)

    return partial(aiohttp.TCPConnector, socket_factory=opened, limit=0, force_close=force_close)
