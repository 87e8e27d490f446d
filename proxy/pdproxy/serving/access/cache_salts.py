"""Whether tenants share engines' caches; if they do not, the salt of each tenant.

Owns the rule of the setting `tenants.caches`. A tenant is here what its key is: clients that name a
tenant in a header are apart within the tenant of their key, so that nobody names another one's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pdproxy.serving.access.keys import Keys
from pdproxy.settings.keys import AUTO, SEPARATE, TenantSettings
from pdproxy.wire.cache_salt import TenantSalt

MAX_KNOWN = 4096
"""Tenants whose salts are kept: those whose salts were used last. A salt that is not kept costs two
hashes.
"""


class CacheSalts:
    """The salts of all tenants. `settings` may change while it is used; `secret` returns the key of
    the hash.
    """

    def __init__(self, settings: TenantSettings, keys: Keys, secret: Callable[[], bytes]) -> None:
        self._settings = settings
        self._keys = keys
        self._secret = secret
        self.headers = False
        """Whether headers name tenants."""
        self._made = lru_cache(maxsize=MAX_KNOWN)(TenantSalt)

    def __repr__(self) -> str:
        return f"<CacheSalts {self._settings.caches}>"

    @property
    def separate(self) -> bool:
        """Whether each tenant has caches of its own."""
        caches = self._settings.caches
        if caches == AUTO:
            return self.headers or self._keys.several
        return caches == SEPARATE

    def of(self, owner: bytes | str, named: str) -> TenantSalt | None:
        """Return a tenant's salt, None where tenants share caches.

        `owner`: the name of its key, the key's digest, or its address; `named`: what a header says,
        "" for nothing.
        """
        return self._made(self._secret(), repr((owner, named))) if self.separate else None
