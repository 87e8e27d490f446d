"""Tenants: among whom places are divided, and by which weights. A tenant is a client
(`access.clients`) with a name of its own.

Owns the rule. A request belongs to the tenant that its header names, where the sender may name one;
else to the name of its key; else to its key or its address.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdproxy.serving.access.cache_salts import CacheSalts
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.upstream.connection import Headers
from pdproxy.wire.cache_salt import TenantSalt

MAX_NAME = 64
"""Characters of a tenant's name in a header. What follows makes no other tenant."""
OTHER = "other"
"""The label of tenants that neither the file of keys nor `overload.weights` names."""


class Tenants:
    """Finds the tenants of requests. `header`: what names one, None if nothing does; `weights` by
    name, 1 for all others.

    `salts`: those of tenants' caches, None where all share them.
    """

    def __init__(
        self,
        clients: Clients,
        keys: Keys,
        header: str | None = None,
        weights: Mapping[str, float] | None = None,
        salts: CacheSalts | None = None,
    ) -> None:
        self._clients = clients
        self._keys = keys
        self._salts = salts
        self.configure(header, weights or {})

    def configure(self, header: str | None, weights: Mapping[str, float]) -> None:
        """Use these from the next request on."""
        self._header = None if header is None else header.lower().encode("latin-1")
        self._weights = weights
        if self._salts is not None:
            self._salts.headers = header is not None

    def named(self, headers: Headers) -> str | None:
        """Return the tenant that a request names, None if it names none."""
        if self._header is None:
            return None
        found = next((value for header, value in headers if header == self._header), b"")
        return found.strip(b" \t")[:MAX_NAME].decode("latin-1") or None

    def salt(self, address: str) -> TenantSalt | None:
        """Return the salt of a client that has no key and names no tenant."""
        return None if self._salts is None else self._salts.of(address, "")

    def enter(
        self, name: bytes | str, key: str | None, headers: Headers, *, may_name: bool
    ) -> tuple[Client, TenantSalt | None]:
        """Return the client of a request, to be used until `Clients.leave`, and the salt of its
        caches.

        `name`: the digest of its key, or its address; `key`: the name of its key. `may_name`:
        whether its sender may name one.
        """
        limits = self._keys.limits()
        tenant = key if key in limits else None
        owner, named = tenant or name, ""
        if may_name and self._header is not None:
            named = self.named(headers) or ""
            tenant = named or tenant
            if named and not self._keys.wanted:
                owner = ""  # who may name tenants without a key names all of them
        salt = None if self._salts is None else self._salts.of(owner, named)
        if tenant is None:
            return self._clients.enter(name), salt
        client = self._clients.enter(f"tenant:{tenant}")
        own = limits.get(tenant)
        weight = self._weights.get(tenant, 1.0)
        client.weight = own.weight if own is not None and own.weight is not None else weight
        client.label = tenant if own is not None or tenant in self._weights else OTHER
        return client, salt
