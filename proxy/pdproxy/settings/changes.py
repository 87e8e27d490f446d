"""What has changed between two versions of the settings: which parts are used at once, and which need a restart. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdproxy.settings.errors import KeyPath, spell_key
from pdproxy.settings.schema import Pool, Settings
from pdproxy.settings.section import Section
from pdproxy.transfer import registry

AT_ONCE: tuple[KeyPath, ...] = (
    ("auth",),
    ("deadlines",),
    ("limits",),
    ("overload",),
    ("media",),
    ("tenants", "caches"),
    ("health",),
    ("outliers",),
    ("probes",),
    ("observe", "log_level"),
    ("pools", 0, "nodes"),
    ("pools", 0, "dns_nodes"),
    ("pools", 0, "models"),
    ("pools", 0, "aliases"),
    ("pools", 0, "weight"),
    ("pools", 0, "alone"),
    ("pools", 0, "policy"),
    ("pools", 0, "slo"),
)
"""The settings, and sections, that are used at once. Files that settings name are read again by themselves."""
EXCEPT: tuple[KeyPath, ...] = (("deadlines", "detect"),)
"""Of these, what needs a restart all the same: the wait is over once requests are served."""
SWITCHES: tuple[KeyPath, ...] = (
    ("health", "stalled_after"),
    ("outliers", "interval"),
    ("limits", "engine_requests"),
    ("limits", "engine_tokens"),
    ("limits", "continuations"),
)
"""Numbers of which 0 turns something off. That needs a restart, and so does turning it on."""
_PLACEMENT: KeyPath = ("policy", "placement")
_ORDER: KeyPath = ("dispatch",)
_SEQUENTIAL: Final = "sequential"


@dataclass(frozen=True, slots=True)
class Changes:
    """`used`: the settings to be used from now on: what differs and needs no restart is that of the new ones.

    `at_once`, `restart`: the names of settings that differ, and are used at once, or need a restart.
    """

    used: Settings
    at_once: tuple[str, ...]
    restart: tuple[str, ...]


def changes(old: Settings, new: Settings) -> Changes:
    """Return what differs. Both have the same sources but for the content of their files."""
    at_once: list[KeyPath] = []
    restart: list[KeyPath] = []
    found = _differ(old, new, ())
    if _is_list_of_pools(old.pools, new.pools, ("pools",)):
        found = [*_by_what_runs(old.pools, new.pools, found)]
    for path in found:
        (at_once if _is_used_at_once(path, old, new) else restart).append(path)
    used = _merged(old, new, (), frozenset(restart))
    pools = [_kept(was, one) for was, one in zip(old.pools, used.pools, strict=True)]
    used = msgspec.structs.replace(used, pools=tuple(pools)) if pools != list(used.pools) else used
    return Changes(used, tuple(map(spell_key, at_once)), tuple(map(spell_key, restart)))


def _by_what_runs(old: Sequence[Pool], new: Sequence[Pool], found: Sequence[KeyPath]) -> Iterator[KeyPath]:
    """Return what differs, of placements and orders by what runs: where a setting does not name them, engines decide."""
    for path in found:
        if path[2:] not in (_PLACEMENT, _ORDER):
            yield path
    for at, (was, now) in enumerate(zip(old, new, strict=True)):
        if was.placement != now.placement:
            yield ("pools", at, *_PLACEMENT)
        if was.dispatch != now.dispatch if was.connector != now.connector else _order(was) != _order(now):
            yield ("pools", at, *_ORDER)


def _kept(old: Pool, used: Pool) -> Pool:
    """Return the settings of a pool with the placement and the order that it has, named if its other settings ask for others."""
    if used.placement != old.placement:
        used = msgspec.structs.replace(used, policy=msgspec.structs.replace(used.policy, placement=old.placement))
    return used if _order(used) == _order(old) else msgspec.structs.replace(used, dispatch=_order(old))


def _order(pool: Pool) -> str | None:
    """Return the order of a prompt's legs in a pool, None if its engines are asked for their connector. See `app.transfer`."""
    if pool.dispatch is not None or pool.connector == registry.AUTO:
        return pool.dispatch
    orders = registry.entry_of(pool.connector).capabilities.orders
    is_any = any(node.role == "any" for node in pool.all_nodes)
    return _SEQUENTIAL if is_any and _SEQUENTIAL in orders else orders[0]


def _is_used_at_once(path: KeyPath, old: Settings, new: Settings) -> bool:
    general = tuple(0 if isinstance(part, int) else part for part in path)
    if general in EXCEPT or not any(general[: len(one)] == one for one in AT_ONCE):
        return False
    if general in SWITCHES:
        return bool(_at(old, path)) == bool(_at(new, path))
    if (
        path[0] == "auth"
    ):  # without keys, engines get clients' own headers: a mistake must not open the proxy, or the engines
        return (old.auth.wants_keys, old.auth.wants_admin_keys) == (new.auth.wants_keys, new.auth.wants_admin_keys)
    if general[2:3] in (("policy",), ("slo",)):
        pools: Sequence[Pool] = (_at(old, path[:2]), _at(new, path[:2]))
        first, second = map(_parts_of_policy, pools)
        return first == second
    return True


def _parts_of_policy(pool: Pool) -> tuple[str, bool]:
    """Return which parts a pool's policy needs: the placement, and whether there is an index of prefixes."""
    return pool.placement, pool.asks_the_index


def _at(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = tree[part] if isinstance(part, int) else getattr(tree, part)
    return tree


def _is_list_of_pools(old: Any, new: Any, path: KeyPath) -> bool:
    """Return whether these are the same pools, in the same order. The one pool may have another name."""
    if path != ("pools",) or len(old) != len(new):
        return False
    return len(old) == 1 or [pool.name for pool in old] == [pool.name for pool in new]


def _differ(old: Any, new: Any, path: KeyPath) -> list[KeyPath]:
    if old == new:
        return []
    if _is_list_of_pools(old, new, path):
        return [one for at in range(len(old)) for one in _differ(old[at], new[at], (*path, at))]
    if isinstance(old, Section) and type(old) is type(new):
        names = [field.name for field in msgspec.structs.fields(old)]
        return [one for name in names for one in _differ(getattr(old, name), getattr(new, name), (*path, name))]
    return [path]


def _merged(old: Any, new: Any, path: KeyPath, restart: frozenset[KeyPath]) -> Any:
    """Return the new value of a setting or section, with the old ones of those that need a restart."""
    if old == new or path in restart:
        return old
    if _is_list_of_pools(old, new, path):
        return tuple(_merged(old[at], new[at], (*path, at), restart) for at in range(len(old)))
    if isinstance(old, Section) and type(old) is type(new):
        names = [field.name for field in msgspec.structs.fields(old)]
        found = {name: _merged(getattr(old, name), getattr(new, name), (*path, name), restart) for name in names}
        return msgspec.structs.replace(old, **found)
    return new
