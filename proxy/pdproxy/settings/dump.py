"""The settings as YAML, for `pdproxy config print`. Owns the mask that replaces a key."""

from __future__ import annotations

import msgspec
import yaml

from pdproxy.settings.errors import MASK
from pdproxy.settings.schema import Settings


def dump(settings: Settings) -> str:
    """Return all settings, defaults included, as YAML that can be loaded again; keys are masked."""
    auth = settings.auth
    replace = msgspec.structs.replace
    masked = replace(
        auth,
        api_keys=(MASK,) * len(auth.api_keys),
        admin_keys=(MASK,) * len(auth.admin_keys),
        engine_api_key=MASK if auth.engine_api_key else None,
    )
    pools = tuple(
        replace(
            pool,
            nodes=tuple(replace(node, api_key=MASK if node.api_key else None) for node in pool.all_nodes),
            dns_nodes=(),  # they were among the others
        )
        for pool in settings.pools
    )
    tenants = replace(settings.tenants, secret=MASK if settings.tenants.secret else None)
    tree = msgspec.to_builtins(replace(settings, auth=masked, tenants=tenants, pools=pools), builtin_types=())
    return yaml.safe_dump(_lists(tree), sort_keys=False, allow_unicode=True)


def _lists(tree: object) -> object:
    # PyYAML writes a tuple with a Python tag, which no safe loader accepts.
    match tree:
        case dict():
            return {name: _lists(value) for name, value in tree.items()}
        case list() | tuple():
            return [_lists(value) for value in tree]
        case _:
            return tree
