"""The objects of one kind, as the API server gave them last, and what has changed of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from pdproxy.fleet.informer import Found
from pdproxy.wire.kubernetes import Renamed
from pdproxy_operator.kinds import Kind
from pdproxy_operator.resources import Name, OwnMetadata

NOTHING = msgspec.Raw(b"{}")


class Unread(Renamed, frozen=True):
    """A PDRuntime or a PDProxy of which only the metadata is read."""

    metadata: OwnMetadata
    spec: msgspec.Raw = NOTHING
    status: msgspec.Raw = NOTHING


class _Object(Protocol):
    @property
    def metadata(self) -> OwnMetadata: ...


F = TypeVar("F", bound=_Object)
Changes = Sequence[tuple[F | None, F | None]]
"""Each object that is new, another or gone: as it was and as it is, None: it was not, or is not,
there.
"""


class Followed(Generic[F]):
    """The objects of one kind in one namespace, or in all. `changed` gets what has changed at once;
    `known` is called when all objects are known for the first time.
    """

    def __init__(
        self,
        kind: Kind,
        namespace: str | None,
        changed: Callable[[Changes[F]], None],
        known: Callable[[], None],
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.is_known = False
        self.is_missing = False
        """Whether this cluster has no such kind."""
        self.problem: str | None = "nothing was heard yet"
        self.heard_at = 0.0
        """When it was known to be as the API has it, in seconds of the event loop."""
        self._changed = changed
        self._known = known
        self._objects: dict[Name, F] = {}
        self._of: dict[str, dict[str, F]] = {}
        """By namespace and name."""
        self._heard = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Followed {self.kind.plural}: {len(self._objects)}>"

    def take(self, found: Found[F]) -> None:
        """Have what an informer says."""
        self.problem = found.problem
        if found.problem is None:
            self.heard_at = asyncio.get_running_loop().time()
        if found.objects is not None:
            self.is_missing = False
            self._have(found.objects)

    def miss(self) -> None:
        """There is no such kind, so nothing of it."""
        self.problem, self.heard_at = None, asyncio.get_running_loop().time()
        self.is_missing = True
        self._have(())

    def _have(self, objects: Collection[F]) -> None:
        before = self._objects
        now = {Name(one.metadata.namespace, one.metadata.name): one for one in objects}
        self._objects, self._of = now, {}
        for name, one in now.items():
            self._of.setdefault(name.namespace, {})[name.name] = one
        changes: list[tuple[F | None, F | None]] = []
        for name, one in now.items():
            was = before.get(name)
            if was is None or (was is not one and _is_other(was, one)):
                changes.append((was, one))
        changes += [(before[name], None) for name in before.keys() - now.keys()]
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()
        if changes:
            self._changed(changes)
        if not self.is_known:
            self.is_known = True
            self._known()

    def of(self, namespace: str) -> Mapping[str, F]:
        """Return those of a namespace, by name."""
        return self._of.get(namespace, {})

    async def has_seen(self, name: Name, version: str) -> None:
        """Wait until an object has this version or a later one, or is gone where `version` is
        "".
        """
        while not self._is_as_new(name, version):
            await self._heard.wait()

    def _is_as_new(self, name: Name, version: str) -> bool:
        one = self._objects.get(name)
        if not version:
            return one is None or one.metadata.deletion_timestamp is not None
        if one is None:
            return False
        known = one.metadata.resource_version
        return known == version or (
            known.isdecimal() and version.isdecimal() and int(known) >= int(version)
        )


def _is_other(was: _Object, one: _Object) -> bool:
    """Return whether an object has changed. By a new definition it has other defaults, and the same
    version.
    """
    before, now = was.metadata, one.metadata
    if (before.uid, before.resource_version) != (now.uid, now.resource_version):
        return True
    return isinstance(was, Unread) and isinstance(one, Unread) and was.spec != one.spec
