"""What an operator should know of tenants' caches at the start."""

from __future__ import annotations

from pdproxy.serving.access.cache_salts import CacheSalts
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry


def salt_warnings(settings: Settings, salts: CacheSalts) -> list[str]:
    """Return where tenants' caches are not as separate as they should be, or more so. Nothing where
    tenants share them.
    """
    if not salts.separate:
        return []
    found = [
        f"pools[{at}]: with the connector {pool.connector}, engines may find KV of other tenants "
        f"outside of their own caches:"
        " not all of its stores know a prompt's cache_salt (docs/guide/security.md)"
        for at, pool in enumerate(settings.pools)
        if pool.connector != registry.AUTO and registry.ignores_salt(pool.connector)
    ]
    tenants = settings.tenants
    if settings.replicas.several and tenants.secret is None and tenants.secret_file is None:
        found.append(
            "tenants: there are several replicas, and no secret or secret_file: each replica "
            "makes other salts, and uses no KV"
            " that engines have cached for another one"
        )
    return found
