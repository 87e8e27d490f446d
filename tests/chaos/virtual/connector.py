"""aiohttp's connections in a virtual network: its own connector makes sockets itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import ceil_timeout

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace


class VirtualConnector(aiohttp.BaseConnector):
    """Connects by the running loop's `create_connection`, as aiohttp's connector for Unix sockets
    does by its own call.

    No connection is kept: aiohttp measures their age by the machine's clock.
    """

    def __init__(self) -> None:
        super().__init__(force_close=True, limit=0)

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        host, port = req.url.host, req.url.port
        assert host is not None
        assert port is not None
        try:
            async with ceil_timeout(timeout.sock_connect, ceil_threshold=timeout.ceil_threshold):
                _, protocol = await self._loop.create_connection(self._factory, host, port)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {req.url}") from None
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        return protocol
