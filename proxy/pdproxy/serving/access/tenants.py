"""Tenants: among whom places are divided, and by which weights. A tenant is a client (`access.clients`) with a name of its own.

Owns the rule. A request belongs to the tenant that its header names, where the sender may name one; else to the name of its key;
else to its key or its address.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.upstream.connection import Headers

MAX_NAME = 64
"""Characters of a tenant's name in a header. What follows makes no other tenant."""
OTHER = "other"
"""The label of tenants that neither the file of keys nor `overload.weights` names."""


class Tenants:
    """Finds the tenants of requests. `header`: what names one, None if nothing does; `weights` by name, 1 for all others."""

    def __init__(
        self, clients: Clients, keys: Keys, header: str | None = None, weights: Mapping[str, float] | None = None
    ) -> None:
        self._clients = clients
        self._keys = keys
        self.configure(header, weights or {})

    def configure(self, header: str | None, weights: Mapping[str, float]) -> None:
        """Use these from the next request on."""
        self._header = None if header is None else header.lower().encode("latin-1")
        self._weights = weights

    def named(self, headers: Headers) -> str | None:
        """Return the tenant that a request names, None if it names none."""
        if self._header is None:
            return None
        named = next((value for header, value in headers if header == self._header), b"")
        return named.strip(b" \t")[:MAX_NAME].decode("latin-1") or None

    def enter(self, name: bytes | str, key: str | None, headers: Headers, *, may_name: bool) -> Client:
        """Return the client of a request, to be used until `Clients.leave`.

        `name`: the digest of its key, or its address; `key`: the name of its key. `may_name`: whether its sender may name one.
        """
        limits = self._keys.limits()
        tenant = key if key in limits else None
        if may_name and self._header is not None:
            tenant = self.named(headers) or tenant
        if tenant is None:
            return self._clients.enter(name)
        client = self._clients.enter(f"tenant:{tenant}")
        own = limits.get(tenant)
        weight = self._weights.get(tenant, 1.0)
        client.weight = own.weight if own is not None and own.weight is not None else weight
        client.label = tenant if own is not None or tenant in self._weights else OTHER
        return client
