"""What the API server of `kubernetes_api` does with writes: server-side apply and merge patches,
and which manager has which fields.

As in Kubernetes: an apply takes away what the same manager has applied before and does not apply
any more, and leaves the fields of others alone; a change by others takes a field from its manager.
Lists of objects with names (or uids, or types) are merged by these, all others are one value.
"""

from __future__ import annotations

import copy
from typing import Any

Object = dict[str, Any]
Path = tuple[Any, ...]
Fields = dict[Path, Any]
OF_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "name", "namespace")
WITH_STATUS = {
    *("deployments", "leaderworkersets", "pdruntimes", "pdproxies", "pods"),
    *("poddisruptionbudgets", "httproutes", "services"),
}
"""Kinds whose status is written at /status alone."""


class ConflictError(Exception):
    """A field is another manager's."""


class Owned:
    """Which fields of one object each manager has."""

    def __init__(self) -> None:
        self.by: dict[str, set[Path]] = {}

    def apply(self, live: Object, wanted: Object, manager: str, *, force: bool) -> Object:
        """Return the object with what a manager applies. Raises ConflictError."""
        before, now = flat(live), flat(wanted)
        mine = self.by.get(manager, set())
        for other, paths in self.by.items():
            if other == manager:
                continue
            for path in paths & now.keys():
                if before.get(path) == now[path]:
                    continue
                if not force:
                    raise ConflictError(f"{other} has {'.'.join(map(str, path))}")
                paths.discard(path)
        others = set().union(*(paths for name, paths in self.by.items() if name != manager))
        gone = mine - now.keys() - others
        self.by[manager] = set(now)
        kept = {path: value for path, value in before.items() if path not in gone}
        return unflat({**kept, **now}, live)

    def update(self, before: Object, after: Object, manager: str) -> None:
        """Note that a manager has changed fields otherwise."""
        was, is_now = flat(before), flat(after)
        changed = {path for path in was.keys() | is_now.keys() if was.get(path) != is_now.get(path)}
        for paths in self.by.values():
            paths -= changed
        self.by.setdefault(manager, set()).update(changed & is_now.keys())


def _name_of(items: list[Any]) -> str | None:
    """Return the field by which a list's items are merged, None: the list is one value."""
    for name in ("name", "uid", "type"):
        if items and all(isinstance(one, dict) and name in one for one in items):
            return name
    return None


def flat(thing: Object) -> Fields:
    """Return the values of an object by their paths, without what is the server's."""
    found: Fields = {}

    def walk(one: Any, path: Path) -> None:
        if isinstance(one, dict) and one:
            for key, value in one.items():
                if (not path and key in ("apiVersion", "kind")) or (
                    path == ("metadata",) and key in OF_SERVER
                ):
                    continue
                walk(value, (*path, key))
        elif isinstance(one, list) and (name := _name_of(one)) is not None:
            for item in one:
                walk(item, (*path, (name, item[name])))
        else:
            found[path] = copy.deepcopy(one)

    walk(thing, ())
    return found


def unflat(fields: Fields, live: Object) -> Object:
    """Return the object with these values. `live`: has what is the server's."""
    made: Object = {key: live[key] for key in ("apiVersion", "kind") if key in live}
    server = live.get("metadata", {})
    made["metadata"] = {key: server[key] for key in OF_SERVER if key in server}
    for path, value in fields.items():
        node: Any = made
        for at, step in enumerate(path):
            is_last = at == len(path) - 1
            following = value if is_last else [] if isinstance(path[at + 1], tuple) else {}
            if isinstance(step, tuple):
                name, wanted = step
                item = next((one for one in node if one.get(name) == wanted), None)
                if item is None:
                    item = {name: wanted}
                    node.append(item)
                node = item
                continue
            if is_last:
                node[step] = copy.deepcopy(value)
            elif not isinstance(node.get(step), type(following)):
                node[step] = following
            node = node[step]
    return made


def merged(thing: Any, patch: Any) -> Any:
    """Return a thing with a merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(thing) if isinstance(thing, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value)
    return made


def is_other_spec(before: Object, after: Object) -> bool:
    """Return whether another generation begins: anything but metadata and status is another."""
    return any(
        before.get(key) != after.get(key)
        for key in before.keys() | after.keys()
        if key not in ("metadata", "status", "apiVersion", "kind")
    )
