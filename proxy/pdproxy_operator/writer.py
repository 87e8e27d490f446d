"""Objects of a group, written to the API one at a time. A mistake in one keeps no other from being
written.

Owns what was written, what the API server refuses, and whose objects lack others that they use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from pdproxy.kit.text import truncate
from pdproxy.upstream.kubernetes import ApiError
from pdproxy_operator.api import Api
from pdproxy_operator.differences import is_as_wanted, stamped
from pdproxy_operator.kinds import PROXIES, RUNTIMES, WRITTEN, Kind, kind_of
from pdproxy_operator.own import OwnObject
from pdproxy_operator.resources import Name, Object, Proxy, Runtime
from pdproxy_operator.store import Store

_USED = ("ServiceAccount", "ConfigMap", "Role")
"""Kinds of objects that other objects use by their names."""


class Writer:
    """Writes what differs, and deletes what is not wanted any more."""

    def __init__(self, store: Store, api: Api, namespace: str) -> None:
        self._store, self._api = store, api
        self._namespace = namespace
        self._own_of: dict[tuple[Kind, str | None], list[OwnObject]] = {}
        """Those that are not being deleted, by the uid of their owner."""
        for kind in WRITTEN:
            for own in store.own(kind, namespace):
                if own.metadata.deletion_timestamp is None:
                    self._own_of.setdefault((kind, own.metadata.controller), []).append(own)
        self.failures: list[ApiError] = []
        """What the API server refuses."""
        self.found_other = False
        """Whether objects of others have names that are needed: nothing tells when they go."""
        self._refused: dict[str, str] = {}
        """By the uid of an owner: why one of its objects is not written."""
        self._incomplete: set[str] = set()
        """The uids of owners that lack an object which others of their objects use."""
        self.written: list[tuple[Kind, Name, str]] = []

    def __repr__(self) -> str:
        return f"<Writer: {len(self.written)} written, {len(self.failures)} refused>"

    def missing(self, wanted: Sequence[Object]) -> str | None:
        """Return which kind this cluster lacks, in a sentence, None: it has all."""
        for one in wanted:
            if self._store.is_missing(kind_of(one)):
                return f"This cluster has no {one['kind']} ({one['apiVersion']})."
        return None

    def own(self, kind: Kind, owner: Runtime | Proxy) -> Sequence[OwnObject]:
        """Return the objects of a kind that are an owner's and stay."""
        return self._own_of.get((kind, owner.metadata.uid), ())

    def refused(self, owner: Runtime | Proxy) -> str | None:
        """Return why one of an owner's objects is not written, None: all are."""
        return self._refused.get(owner.metadata.uid)

    def is_complete(self, owner: Runtime | Proxy) -> bool:
        """Return whether an owner has all objects that others of its objects use."""
        return owner.metadata.uid not in self._incomplete

    async def do(
        self, write: Awaitable[str], kind: Kind, namespace: str, name: str
    ) -> ApiError | None:
        """Write one object. A refusal keeps no other from being written, and is returned."""
        try:
            self.written.append((kind, Name(namespace, name), await write))
        except ApiError as error:
            self.note(error)
            return error
        return None

    def note(self, error: ApiError) -> None:
        """Keep what the API server has refused. Raises ApiError if it refuses all others, too."""
        if error.status is None or error.status >= 500 or error.status in (401, 429):
            raise error  # it would be the same for all others
        self.failures.append(error)

    async def apply(self, owner: Runtime | Proxy, wanted: Object) -> None:
        """Write an object, if it is not as it is wanted. An object of others stays as it is."""
        kind, name = kind_of(wanted), Name(self._namespace, wanted["metadata"]["name"])
        complete = stamped(wanted)
        live = self._store.own_of(kind, name)
        if live is not None and live.metadata.deletion_timestamp is not None:
            return  # it is made anew when it is gone
        if live is None:
            try:
                found = await self._api.find(kind, name)
            except ApiError as error:
                self.note(error)
                return
            # its own without the label is as one that differs
            if found is not None and found.controller != owner.metadata.uid:
                self._note_other(owner, wanted)
                return
        elif live.metadata.controller != owner.metadata.uid:
            known = self._store.uids(self._namespace)
            if live.metadata.is_of_operator and live.metadata.controller not in known:
                await self.delete(kind, live)  # its owner is gone, and another has the name
            else:
                self._note_other(owner, wanted)
            return
        elif is_as_wanted(live, complete):
            return
        refusal = await self.do(self._api.apply(complete), kind, *name)
        if refusal is not None:
            said = truncate(refusal.message or str(refusal))
            why = f"The API server refuses the {kind.kind} {name.name}: {said}"
            self._refuse(owner, wanted, why)

    def _note_other(self, owner: Runtime | Proxy, wanted: Object) -> None:
        """An object that is not the owner's has the name of one that it needs."""
        name = wanted["metadata"]["name"]
        of = RUNTIMES.kind if isinstance(owner, Runtime) else PROXIES.kind
        why = f"There is a {wanted['kind']} {name} that is not of this {of}: rename or delete it."
        self._refuse(owner, wanted, why)
        self.found_other = True

    def _refuse(self, owner: Runtime | Proxy, wanted: Object, why: str) -> None:
        self._refused.setdefault(owner.metadata.uid, why)
        if wanted["kind"] in _USED:
            self._incomplete.add(owner.metadata.uid)

    async def delete_unwanted(
        self, owner: Runtime | Proxy, wanted: Sequence[Object], keeps: Sequence[Kind] = ()
    ) -> None:
        """Delete an owner's objects that are not wanted any more, but for those of some kinds."""
        names = {(kind_of(one), one["metadata"]["name"]) for one in wanted}
        for kind in reversed(WRITTEN):
            if kind in keeps:
                continue
            for one in self.own(kind, owner):
                if (kind, one.metadata.name) not in names:
                    await self.delete(kind, one)

    async def delete(self, kind: Kind, one: OwnObject) -> None:
        """Delete an object."""
        name = one.metadata.name

        async def deleted() -> str:
            await self._api.delete(kind, one.metadata)
            return ""

        await self.do(deleted(), kind, self._namespace, name)

    async def scale(self, kind: Kind, live: OwnObject, target: int) -> None:
        """Change how many pods there are of a template that nobody knows any more."""
        name = Name(self._namespace, live.metadata.name)
        await self.do(self._api.scale(kind, *name, target), kind, *name)
