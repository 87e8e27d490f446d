"""Looks at every byte that clients of this process's proxies get, whatever they are and in
whichever way a test made them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

_KEPT = 1 << 20
"""Bytes of a connection that wait to be looked at; what is longer is looked at in parts."""
_OVERLAP = 1 << 10
_SENT = 1 << 18
_MAX_FOUND = 20
_HANDLE = re.compile(
    rb'"[a-z_]*_transfer_params": '
    rb'?(?!null)|"(?:do_)?remote_[a-z_]+":|"(?:engine_id|transfer_id|kvcache_[a-z_]+|disagg_spec)":'
    rb"|___(?:prefill|decode)_addr_"
)
"""What only handles have, and ids that name engines."""
_LEARNED = re.compile(
    rb'"(?:remote_engine_id|remote_request_id|engine_id|transfer_id)": '
    rb'?"([^"]{8,200})"|"remote_block_ids": ?(\[\[[\d, ]{8,}\]\])'
)
"""Values of handles that engines send and are sent."""
_OPERATORS = re.compile(rb"(?m)^[A-Z]+ \S*/(?:ready|metrics|healthcheck|docs|openapi|api/)")
"""Requests of operators, who are told of engines."""
_ASKED = b"x-pdproxy-decision"


class Connection:
    """What one client has sent and got."""

    def __init__(self, look: Callable[[Connection], None]) -> None:
        self.sent = bytearray()
        self.got = bytearray()
        self.may_see_engines = False
        self._look = look

    def sends(self, data: bytes) -> None:
        self.may_see_engines = (
            self.may_see_engines or bool(_OPERATORS.search(data)) or _ASKED in data.lower()
        )
        self.sent += data[: _SENT - len(self.sent)]

    def gets(self, data: bytes) -> None:
        self.got += data
        if len(self.got) > _KEPT:
            self._look(self)
            del self.got[:-_OVERLAP]


class _Transport:
    """A client's transport that keeps what is written. All else is the transport's."""

    def __init__(self, transport: Any, connection: Connection) -> None:
        self._transport, self._connection = transport, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._connection.gets(data)
        self._transport.write(data)

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)


class Watch:
    """The connections of one test, and what their clients must not see."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.found: list[str] = []
        self.secrets: set[bytes] = set()
        """Values of handles, ids of legs."""
        self.engines: list[Any] = []

    def look(self, connection: Connection) -> None:
        """Look at what a client has got so far."""
        got, sent = bytes(connection.got), bytes(connection.sent)
        for found in _HANDLE.finditer(got):
            if found[0] not in sent:
                self._note("a handle", got, found.start())
                break
        for secret in self.secrets:
            if secret in got and secret not in sent:
                self._note("a value of a handle, or the id of a leg", got, got.find(secret))
        if connection.may_see_engines:
            return
        for engine in self.engines:
            place = engine.url.partition("://")[2].encode()
            if place in got and place not in sent:
                self._note(f"the address of the {engine.facts.role} engine", got, got.find(place))

    def learn(self, data: bytes) -> None:
        """Learn from what goes to an engine, or comes from it."""
        if b'_id": ' in data or b'_id":' in data:
            self.secrets.update(one[1] or one[2] for one in _LEARNED.finditer(data))

    def _note(self, what: str, got: bytes, at: int) -> None:
        if len(self.found) < _MAX_FOUND:
            self.found.append(f"{what}: ...{got[max(at - 100, 0) : at + 200]!r}...")


@contextmanager
def nothing_inside() -> Iterator[None]:
    """Fail at the end if a client got a handle, a value of one, the id of a leg, or the address of
    an engine.

    What the client itself has sent is not counted.
    """
    guard = sys.modules.get("pdproxy.web.protocol")
    if guard is None:  # no test of this process has a proxy so far
        yield
        return
    watch = Watch()
    with ExitStack() as stack:
        _follow_clients(guard.DataPathProtocol, watch, stack)
        _follow_engines(watch, stack)
        yield
    for connection in watch.connections:
        watch.look(connection)
    if watch.found:
        pytest.fail("clients got what names engines:\n" + "\n".join(watch.found), pytrace=False)


def _follow_clients(protocol: Any, watch: Watch, stack: ExitStack) -> None:
    made, received = protocol.connection_made, protocol.data_received
    by_protocol: dict[int, Connection] = {}

    def connection_made(self: Any, transport: Any) -> None:
        if transport.get_extra_info("socket") is not None:
            connection = by_protocol[id(self)] = Connection(watch.look)
            watch.connections.append(connection)
            transport = _Transport(transport, connection)
        made(self, transport)

    def data_received(self: Any, data: bytes) -> None:
        if (connection := by_protocol.get(id(self))) is not None:
            connection.sends(data)
        received(self, data)

    stack.enter_context(patch.object(protocol, "connection_made", connection_made))
    stack.enter_context(patch.object(protocol, "data_received", data_received))


def _follow_engines(watch: Watch, stack: ExitStack) -> None:
    connection = sys.modules["pdproxy.upstream.connection"].EngineConnection
    received = connection.data_received

    def data_received(self: Any, data: bytes) -> None:
        watch.learn(data)
        received(self, data)

    stack.enter_context(patch.object(connection, "data_received", data_received))
    for name in ("serving.dispatch.attempt", "serving.kv.release", "serving.kv.turn_release"):
        if (module := sys.modules.get(f"pdproxy.{name}")) is None:
            continue  # so far no test of this process has a whole proxy

        def mint(*arguments: Any, _mint: Any = module.mint) -> str:
            minted = str(_mint(*arguments))
            watch.secrets.add(minted.encode())
            return minted

        stack.enter_context(patch.object(module, "mint", mint))
    server = sys.modules.get("pdproxy_lab.sim.server")
    if server is not None:
        start = server.SimServer.__init__

        def init(self: Any, *arguments: Any, **named: Any) -> None:
            watch.engines.append(self)
            start(self, *arguments, **named)

        stack.enter_context(patch.object(server.SimServer, "__init__", init))
