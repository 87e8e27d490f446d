"""A request on its way from the connection to the service: a generating one, or one that an engine
serves whole, as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.keys import Head, ValidKey
from pdproxy.serving.access.routes import RouteEntry
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.cache_salt import TenantSalt
from pdproxy.wire.route import Route


class Incoming(msgspec.Struct):
    """A request as it was received. The reader of the body removes it from here.

    `forward` has the headers (name, value) that go on to engines, without the credentials, `hints`
    those for the proxy itself; `adapter` is the value of `client_routes.ADAPTER_HEADER`, None for a
    blank one, which names no model. `client`: the client's address; `key`: the name of its key;
    `salt`: of its tenant's caches, None where tenants share them. `found`: the key itself, None
    without one; `refusal`: why its sender is refused; `head`: what looks at the head again.
    """

    route: Route
    request_id: str | None
    authorization: bytes | None
    content_type: str
    forward: tuple[tuple[bytes, bytes], ...]
    body: Body
    head: Head
    adapter: bytes | None = None
    client: str | None = None
    key: str | None = None
    hints: tuple[tuple[bytes, bytes], ...] = ()
    salt: TenantSalt | None = None
    found: ValidKey | None = None
    refusal: PdproxyError | None = None


@dataclass(frozen=True, slots=True)
class IncomingPassthrough:
    """A request as it came: `forward` holds the header lines that go on to the engine, without the
    credentials.

    `client`: the client's address; `key`: the name of its key; `session`: what names its
    conversation, None where nothing does; `hints`: the header lines for the proxy itself; `salt`:
    of its tenant's caches, None where tenants share them; `found`: the key, None without one;
    `refusal`: why its sender is refused; `head`: what looks at the head again.
    """

    entry: RouteEntry
    request_id: str | None
    authorization: bytes | None
    content_type: str
    forward: tuple[tuple[bytes, bytes], ...]
    body: Body
    head: Head
    client: str | None = None
    key: str | None = None
    session: str | None = None
    hints: tuple[tuple[bytes, bytes], ...] = ()
    salt: TenantSalt | None = None
    found: ValidKey | None = None
    refusal: PdproxyError | None = None
