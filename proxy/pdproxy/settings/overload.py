"""The section `overload`: who is served first while requests wait for places.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdproxy.settings.policy import HeaderName
from pdproxy.settings.section import AtOnce, Section

Weight = Annotated[float, Meta(ge=0.001, le=1000)]
Priorities = Literal["within", "ignore"]


class Overload(Section, frozen=True):
    """Who is served first while requests wait for places (limits.max_inflight)."""

    tenant_header: AtOnce[HeaderName | None] = None
    """The header that names the tenant of a request, up to 64 characters. It is read only of clients with a valid key, and behind
    listen.trusted_proxies: whoever names a tenant uses its part. null: each name of keys, key or address is a tenant."""

    weights: AtOnce[dict[str, Weight]] = {}  # noqa: RUF012 - a struct copies its defaults
    """Parts of the places by tenant, where several wait, from 0.001 to 1000: names of tenant_header, or of keys (a key's own line
    goes first). 1 for all others."""

    output_weight: AtOnce[Annotated[float, Meta(ge=0, le=1000)]] = 2.0
    """What a token of an answer counts, in tokens of prompts: an engine computes many tokens of a prompt at once, and those of an
    answer one by one."""

    priority: AtOnce[Priorities] = "within"
    """What a request's `priority` (or X-Vllm-Priority) does here. within: of one tenant's requests that wait, the smallest is
    served first. ignore: nothing. Engines get it in either case."""
