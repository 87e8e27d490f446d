"""Whether a key is good for what a request asks for: its route, tenant, model and pool. Pure.

A model counts by the name that engines know: another name for it (`pools[].aliases`) opens nothing
that the key does not name.
"""

from __future__ import annotations

from pdproxy.kit.errors import ForbiddenError, ModelNotFoundError
from pdproxy.serving.access.models import fit
from pdproxy.serving.access.routes import ENTRIES, MODELS
from pdproxy.settings.keys import KeyRights


def check_route(rights: KeyRights, path: str) -> None:
    """Refuse a route. `path`: in the table of routes.

    Raises:
        ForbiddenError: the key names others.
    """
    if rights.routes is None or path == MODELS:
        return
    if (route := ENTRIES[path].key_route) not in rights.routes:
        raise ForbiddenError(f"This API key may not use the route `{route}`.")


def check_tenant(rights: KeyRights, tenant: str | None) -> None:
    """Refuse a tenant that a request names, None: it names none. Raises ForbiddenError: the key
    names others.
    """
    if rights.tenants is not None and tenant is not None and tenant not in rights.tenants:
        raise ForbiddenError("This API key may not use the tenant that the request names.")


def may_use(rights: KeyRights | None, model: str) -> bool:
    """Return whether a key is good for a model, by the name that engines know."""
    return (
        rights is None
        or rights.models is None
        or any(fit(one, model) >= 0 for one in rights.models)
    )


def shown_to(rights: KeyRights | None, error: ModelNotFoundError) -> ModelNotFoundError:
    """Return the error that no pool has a model, with the names that a key is good for."""
    return ModelNotFoundError(error.model, [name for name in error.names if may_use(rights, name)])


def check_model(rights: KeyRights, model: str | None) -> None:
    """Refuse a model, by the name that engines know. None: the engine would choose it.

    Raises:
        ForbiddenError: the key names others.
    """
    if rights.models is None:
        return
    if not model:
        raise ForbiddenError(
            "This API key is good for some models only: the request must name one.", param="model"
        )
    if not may_use(rights, model):
        raise ForbiddenError(
            "This API key may not use the model that the request names.", param="model"
        )


def may_use_pool(rights: KeyRights | None, pool: str) -> bool:
    """Return whether a key is good for a pool."""
    return rights is None or rights.pools is None or pool in rights.pools


def check_pool(rights: KeyRights, pool: str) -> None:
    """Refuse a pool. Raises ForbiddenError: the key names others."""
    if not may_use_pool(rights, pool):
        raise ForbiddenError("This API key may not use the engines of this model.", param="model")
