"""A request that one engine serves whole, as it came."""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.keys import Head, ValidKey
from pdproxy.serving.access.routes import RouteEntry
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.cache_salt import TenantSalt


@dataclass(frozen=True, slots=True)
class IncomingPassthrough:
    """A request as it came: `forward` holds the header lines that go on to the engine, without the credentials.

    `client`: the client's address; `key`: the name of its key; `session`: what names its conversation, None where nothing does;
    `hints`: the header lines for the proxy itself; `salt`: of its tenant's caches, None where tenants share them;
    `found`: the key, None without one; `refusal`: why its sender is refused; `head`: what looks at the head again.
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
