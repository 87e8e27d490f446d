"""Settings that change while a proxy runs: what is used at once, what needs a restart, and which
values are in force.

A proxy has sections of its own. All parts that keep one of these read its values when they need
them. Where a part has made something of a value, its owner (`app.live`) has it do so again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from pdproxy.settings.engines import BY_LABEL
from pdproxy.settings.errors import KeyPath, spell_key
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Live, Section, fields_of
from pdproxy.transfer import registry

Kind = TypeVar("Kind", bound=Section)

_PLACEMENT: KeyPath = ("policy", "placement")
_ORDER: KeyPath = ("dispatch",)
_SEQUENTIAL: Final = "sequential"
_Change = tuple[KeyPath, bool]
"""What differs, and whether it is used at once."""


@dataclass(frozen=True, slots=True)
class SettingsChanges:
    """`used`: the settings to be used from now on: what differs and needs no restart is that of the
    new ones.

    `at_once`, `restart`: the names of settings that differ, and are used at once, or need a
    restart.
    """

    used: Settings
    at_once: tuple[str, ...]
    restart: tuple[str, ...]


def changes(old: Settings, new: Settings) -> SettingsChanges:
    """Return what differs. Both have the same sources but for the content of their files."""
    found = [*_differ(old, new, ())]
    if _is_list_of_pools(old.pools, new.pools, ("pools",)):
        found = [*_by_what_runs(old.pools, new.pools, found)]
    at_once = [path for path, is_used in found if is_used]
    restart = [path for path, is_used in found if not is_used]
    used = _merged(old, new, (), frozenset(restart))
    pools = [_kept(was, one) for was, one in zip(old.pools, used.pools, strict=True)]
    used = msgspec.structs.replace(used, pools=tuple(pools)) if pools != list(used.pools) else used
    return SettingsChanges(used, tuple(map(spell_key, at_once)), tuple(map(spell_key, restart)))


def _by_what_runs(
    old: Sequence[Pool], new: Sequence[Pool], found: Sequence[_Change]
) -> Iterator[_Change]:
    """Return what differs, of placements and orders by what runs: where a setting does not name
    them, engines decide.
    """
    for path, is_used in found:
        if path[2:] not in (_PLACEMENT, _ORDER):
            yield path, is_used
    for at, (was, now) in enumerate(zip(old, new, strict=True)):
        if was.placement != now.placement:
            yield ("pools", at, *_PLACEMENT), False
        if (
            was.dispatch != now.dispatch
            if was.connector != now.connector
            else _order(was) != _order(now)
        ):
            yield ("pools", at, *_ORDER), False


def _kept(old: Pool, used: Pool) -> Pool:
    """Return the settings of a pool with the placement and the order that it has, named if its
    other settings ask for others.
    """
    if used.placement != old.placement:
        used = msgspec.structs.replace(
            used, policy=msgspec.structs.replace(used.policy, placement=old.placement)
        )
    return (
        used if _order(used) == _order(old) else msgspec.structs.replace(used, dispatch=_order(old))
    )


def _order(pool: Pool) -> str | None:
    """Return the order of a prompt's legs in a pool, None if its engines are asked for their
    connector. See `app.transfer`.
    """
    if pool.dispatch is not None or pool.connector == registry.AUTO:
        return pool.dispatch
    orders = registry.entry_of(pool.connector).capabilities.orders
    is_any = any(node.role in ("any", BY_LABEL) for node in pool.nodes)
    return _SEQUENTIAL if is_any and _SEQUENTIAL in orders else orders[0]


def _is_list_of_pools(old: Any, new: Any, path: KeyPath) -> bool:
    """Return whether these are the same pools, in the same order. The one pool may have another
    name.
    """
    if path != ("pools",) or len(old) != len(new):
        return False
    return len(old) == 1 or [pool.name for pool in old] == [pool.name for pool in new]


def _differ(
    old: Any, new: Any, path: KeyPath, *, may_be_used: bool = True, live: Live | None = None
) -> Iterator[_Change]:
    """Yield what differs. `may_be_used`: no section around it needs a restart; `live`: the mark of
    the setting.
    """
    if old == new:
        return
    if _is_list_of_pools(old, new, path):
        for at, pool in enumerate(old):
            yield from _differ(pool, new[at], (*path, at))
    elif isinstance(old, Section) and type(old) is type(new):
        for field in fields_of(type(old)):
            same = may_be_used and (
                field.while_same is None or field.while_same.of(old) == field.while_same.of(new)
            )
            ours, theirs = getattr(old, field.name), getattr(new, field.name)
            yield from _differ(ours, theirs, (*path, field.name), may_be_used=same, live=field.live)
    else:
        yield path, may_be_used and live is not None and live.is_used(old, new)


def _merged(old: Any, new: Any, path: KeyPath, restart: frozenset[KeyPath]) -> Any:
    """Return the new value of a setting or section, with the old ones of those that need a
    restart.
    """
    if old == new or path in restart:
        return old
    if _is_list_of_pools(old, new, path):
        return tuple(_merged(old[at], new[at], (*path, at), restart) for at in range(len(old)))
    if isinstance(old, Section) and type(old) is type(new):
        names = [field.name for field in fields_of(type(old))]
        found = {
            name: _merged(getattr(old, name), getattr(new, name), (*path, name), restart)
            for name in names
        }
        return msgspec.structs.replace(old, **found)
    return new


def own(section: Kind) -> Kind:
    """Return settings whose sections nobody else has. Defaults are shared by all settings. Pools
    stay as they are.
    """
    sections = {name: one for name, one in _items(section) if isinstance(one, Section)}
    return msgspec.structs.replace(section, **{name: own(one) for name, one in sections.items()})


def put(section: Section, values: Section) -> None:
    """Have settings that `own` has returned hold other values in the fields that are marked
    (`Live`).
    """
    for field in fields_of(type(section)):
        value = getattr(values, field.name)
        if isinstance(value, Section):
            put(getattr(section, field.name), value)
        elif field.live is not None:
            msgspec.structs.force_setattr(section, field.name, value)


def _items(section: Section) -> list[tuple[str, object]]:
    return [(field.name, getattr(section, field.name)) for field in fields_of(type(section))]
