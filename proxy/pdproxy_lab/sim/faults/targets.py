"""What a fault acts on: a connection, an answer, the engine, its process, a notice. Protocols and
values only.

The server implements the protocols, so faults need neither sockets nor an event loop.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.write_style import WriteStyle

Message = MutableMapping[str, Any]
"""An ASGI message."""


class Connection(Protocol):
    """A client's connection."""

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""

    def close(self) -> None:
        """Close with a FIN after what was written."""

    def reset(self) -> None:
        """Close now with an RST."""

    def ignore_input(self) -> None:
        """Drop everything that the client still sends."""

    def pause_reading(self, seconds: float) -> None:
        """Read nothing for some seconds."""


class AnswerWriter(Protocol):
    """Writes one answer to its connection."""

    style: WriteStyle

    @property
    def head_out(self) -> bool:
        """Whether status and headers have been sent."""

    async def send(self, message: Message) -> None:
        """Write an ASGI message."""

    async def rendered(self, message: Message) -> tuple[bytes, bool]:
        """Return the bytes of an ASGI message, and whether the connection closes after them."""

    async def raw(self, data: bytes) -> None:
        """Write bytes as they are."""


class EngineControls(Protocol):
    """What can be made to fail in an engine."""

    @property
    def facts(self) -> SimFacts:
        """What the engine is."""

    def expire_leases(self) -> object:
        """End the lease of every handle now."""

    def fail_loads(self) -> None:
        """Let the next pull of KV fail."""

    def kill_core(self) -> None:
        """Let the core die."""


class ProcessControls(Protocol):
    """What can happen to the whole process. Nothing of it waits: it happens after the caller's
    step.
    """

    def kill_soon(self) -> None:
        """SIGKILL."""

    def terminate_soon(self) -> None:
        """SIGTERM."""

    def restart_soon(self, down: float) -> None:
        """SIGKILL, and a new process after `down` seconds."""

    def freeze_now(self, seconds: float) -> None:
        """SIGSTOP; SIGCONT after some seconds, 0: never."""

    def freeze_core_now(self, seconds: float, rank: int | None) -> None:
        """SIGSTOP of the engine core alone, or of one rank's; SIGCONT after some seconds, 0:
        never.
        """


class AnswerTarget(Protocol):
    """The answer to one request at some moment."""

    @property
    def connection(self) -> Connection:
        """The client's connection."""

    @property
    def writer(self) -> AnswerWriter:
        """What writes the answer."""

    @property
    def engine(self) -> EngineControls:
        """The engine."""

    @property
    def process(self) -> ProcessControls:
        """The engine's process."""

    @property
    def path(self) -> str:
        """The route."""

    @property
    def streamed(self) -> bool:
        """Whether the client asked for a stream."""

    @property
    def usage_at_end(self) -> bool:
        """Whether the client asked for a usage event at the end of a stream."""

    @property
    def start(self) -> Message | None:
        """The application's status and headers; None before it has sent them."""

    @property
    def due(self) -> Message | None:
        """What the application is about to send."""

    def abort(self) -> None:
        """Have the engine end the request with the finish reason "abort"."""

    def ended(self) -> None:
        """Record that the engine ends the answer: the client has not left."""


@dataclass
class Delivery:
    """How one notice is sent. Faults change it."""

    copies: int = 1
    delay: float = 0.0
    """Seconds."""
    first: list[bytes] = field(default_factory=list)
    """Messages that are sent before it, without the delay."""
