"""The interface of a client's WebSocket, in place of a writer of answers."""

from __future__ import annotations

from typing import Protocol

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.upstream.connection import Headers


class ClientWebSocket(Protocol):
    """The client's end. First it is accepted, or its handshake is answered by `whole`."""

    def accept(self, headers: Headers) -> None:
        """Answer the handshake, with these additional headers.

        Raises:
            BadRequestError: it is none.
        """

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer the handshake with an error."""

    async def next_message(self) -> bytes | None:
        """Return the client's next message, None once it has closed the WebSocket. Only one is read
        ahead.

        Raises:
            PdproxyError: the client has broken the protocol, or one of its limits.
        """

    async def send_message(self, message: bytes) -> None:
        """Send a message, and wait until the client can take more. Nothing is sent behind the
        end.
        """

    def keep(self) -> None:
        """An engine works for it from now on: it does not make room for another client's connection
        any more.
        """

    def close(self, code: int, last: bytes | None = None) -> None:
        """End it, behind a last message. Waits for nobody; a second call changes nothing."""

    @property
    def client(self) -> Client:
        """The client whose it is."""

    @property
    def begun(self) -> bool:
        """Whether the handshake was answered."""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""

    @property
    def ended_by(self) -> PdproxyError | None:
        """Why it is ended although its client is there; None if it is not."""
