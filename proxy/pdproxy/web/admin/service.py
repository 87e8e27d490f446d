"""What the admin API does with engines. Owns what one that is added so may not
have.

All of it is synchronous: an answer says what is the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pdproxy.fleet.entries import EngineEntries, EngineEntry, PoolEngines
from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import ADMIN
from pdproxy.kit.errors import BadRequestError
from pdproxy.observe.recent import Recent
from pdproxy.scheduling.decisions import KeptDecisions
from pdproxy.settings.conform import conform
from pdproxy.settings.engines import ConfiguredEngine, both_schemes, engine_url
from pdproxy.settings.errors import SettingsError, did_you_mean, quote
from pdproxy.web.admin.changes import Change
from pdproxy.web.admin.errors import ConflictError, refusal
from pdproxy.web.admin.shapes import (
    DrainOrder,
    EngineChanged,
    EngineOrder,
    LevelShown,
    LogLevelOrder,
)

LASTS = (
    "it stays until this process ends, also when the settings are read again: name it in the "
    "settings to keep it for longer"
)
_FILES = (
    ("api_key_file",),
    ("tls", "ca"),
    ("tls", "certificate"),
    ("tls", "key"),
    ("facts", "profile"),
)
"""Settings of an engine that name files of this machine. Who may add engines need not be able to
read them.
"""
MAX_LABELS = 4096
"""Characters of an engine's labels: lists show those of thousands of engines."""


class LevelHolder(Protocol):
    """Holds the log level that is in force."""

    level: str
    level_set_by: str


class AdminService:
    """All pools'. `decisions`: the last ones of their placements; `set_log_level(level)` has it
    used at once.

    `serving(model)` returns the numbers of the pools that serve a model.
    """

    def __init__(
        self,
        entries: EngineEntries,
        recent: Recent,
        decisions: Callable[[], KeptDecisions],
        log: LevelHolder,
        set_log_level: Callable[[str], None],
        serving: Callable[[str], Sequence[int]],
    ) -> None:
        self.entries = entries
        self.recent = recent
        self.decisions = decisions
        self._log = log
        self._set_log_level = set_log_level
        self._serving = serving

    @property
    def pools(self) -> list[str]:
        """The names of all pools."""
        return [pool.name for pool in self.entries.pools]

    def serving(self, model: str) -> list[str]:
        """Return the names of the pools that serve a model: by their engines, an alias or a
        pattern.
        """
        return [self.entries.pools[at].name for at in self._serving(model)]

    def pool(self, name: str | None, key: str = "pool") -> PoolEngines:
        """Return the pool with a name, without one the only pool. `key`: where the name was read.

        Raises:
            BadRequestError: there is no such pool, or there are several, and none is named.
        """
        pools, names = self.entries.pools, self.pools
        if name is None and len(pools) == 1:
            return pools[0]
        expected = (
            f"expected {', '.join(names[:-1])} or {names[-1]}"
            if len(names) > 1
            else f"expected {names[0]}"
        )
        if name is None:
            raise BadRequestError(f"{key}: missing: there are several pools: {expected}")
        if name not in names:
            raise BadRequestError(
                f"{key}: {quote(name)} is no pool: {expected}{did_you_mean(name, names)}"
            )
        return pools[names.index(name)]

    def do(self, change: Change) -> tuple[int, EngineChanged | LevelShown]:
        """Do what an operator asks for. Return the status with the answer. The errors are those of
        the methods below.
        """
        name = change.engine
        match change.kind:
            case "add":
                return self.add(change.fields)
            case "drain":
                return 202, self.drain(name, change.fields)
            case "undrain":
                return 200, self.undrain(name)
            case "remove":
                changed = self.remove(name, at_once=change.at_once, seconds=change.seconds)
                return 202 if changed.result == "removing" else 200, changed
            case "log_level":
                return 200, self.set_level(change.fields)

    def found(self, name: str) -> EngineEntry:
        """Return one engine, by its id or URL.

        Raises:
            NotThereError: there is no such engine.
        """
        try:
            return self.entries.entry(self.entries.find(name)[1])
        except MembershipError as error:
            raise refusal(error) from None

    def has(self, name: str) -> bool:
        """Return whether there is an engine of this id or URL that stays."""
        try:
            pool, url = self.entries.find(name)
        except MembershipError:
            return False
        return not pool.membership.members[url].leaves

    def add(self, fields: Mapping[str, Any]) -> tuple[int, EngineChanged]:
        """Add an engine. Return the status with the answer: 201 if it is new.

        Raises:
            BadRequestError: its settings are wrong, it can't work in this pool, or it names no pool
                though there are several.
            ConflictError: it is there with other settings, or in another pool, or there are too
                many.
        """
        try:
            plain = conform(dict(fields), EngineOrder, "")
            _refuse_files(plain)
            if (
                sum(map(len, [*plain.get("labels", {}), *plain.get("labels", {}).values()]))
                > MAX_LABELS
            ):
                raise BadRequestError(f"labels: more than {MAX_LABELS} characters")
            pool = self.pool(plain.pop("pool", None))
            engine = msgspec.convert(plain, ConfiguredEngine)
            engine = msgspec.structs.replace(engine, url=engine_url(engine.url, ("url",)))
            self._refuse_others(engine.url, pool)
            before = pool.membership.members.get(engine.url)
            source, left = (None, False) if before is None else (before.source, before.leaves)
            member = pool.membership.add(engine, ADMIN)
        except (SettingsError, MembershipError) as error:
            raise refusal(error) from None
        entry = self.entries.entry(member.url)
        if source is None:
            return 201, EngineChanged("added", LASTS, entry)
        if left:
            return 200, EngineChanged(
                "serving_again",
                f"it was being removed by {source}, and serves again; {LASTS}",
                entry,
            )
        note = (
            LASTS
            if source == ADMIN
            else f"{source} has added it; if that gives it up, it stays until this process ends"
        )
        return 200, EngineChanged("wanted", note, entry)

    def _refuse_others(self, url: str, pool: PoolEngines) -> None:
        for other in self.entries.pools:
            for one in both_schemes(url):
                if other is not pool and (member := other.membership.members.get(one)) is not None:
                    how = "still leaves" if member.leaves else "is an engine of"
                    text = f"{one} {how} pool {other.name}: an engine is in one pool at a time"
                    raise ConflictError(text, member.source)

    def drain(self, name: str, fields: Mapping[str, Any]) -> EngineChanged:
        """Give an engine no more requests.

        Raises:
            NotThereError: there is no such engine.
            ConflictError: it is to be removed behind that, and another source has added it.
        """
        try:
            order = msgspec.convert(conform(dict(fields), DrainOrder, ""), DrainOrder)
            pool, url = self.entries.find(name)
            if not order.keep:
                return self._removing(pool, url, order.seconds)
            member = pool.membership.members[url]
            pool.membership.drain(url, ADMIN, seconds=order.seconds)
        except (SettingsError, MembershipError) as error:
            raise refusal(error) from None
        if member.leaves:
            return EngineChanged(
                "removing",
                f"{member.source} removes it: add it to keep it",
                self.entries.entry(url),
            )
        return EngineChanged(
            "draining", "it gets no more requests until it is undrained", self.entries.entry(url)
        )

    def undrain(self, name: str) -> EngineChanged:
        """Give an engine requests again.

        Raises:
            NotThereError: there is no such engine.
            ConflictError: it is not being drained, or is being removed.
        """
        try:
            pool, url = self.entries.find(name)
            member = pool.membership.members[url]
            if member.leaves:
                raise ConflictError(
                    f"{url} is being removed by {member.source}: add it to keep it", member.source
                )
            pool.membership.undrain(url, ADMIN)
        except MembershipError as error:
            raise refusal(error) from None
        return EngineChanged("undrained", "it gets requests again", self.entries.entry(url))

    def remove(self, name: str, *, at_once: bool, seconds: float | None = None) -> EngineChanged:
        """Have an engine drained and removed. `at_once`: it is removed now; its requests go on.

        Raises:
            NotThereError: there is no such engine.
            ConflictError: another source has added it.
        """
        try:
            pool, url = self.entries.find(name)
            if not at_once:
                return self._removing(pool, url, seconds)
            if pool.membership.remove(url, ADMIN, at_once=True):
                return EngineChanged("removed", "its requests go on until they end", None)
        except MembershipError as error:
            raise refusal(error) from None
        return self._kept(url)

    def _removing(self, pool: PoolEngines, url: str, seconds: float | None) -> EngineChanged:
        if not pool.membership.remove(url, ADMIN, seconds=seconds):
            return self._kept(url)
        note = "it gets no more requests, and is removed once nothing is left of those that it has"
        return EngineChanged("removing", note, self.entries.entry(url))

    def _kept(self, url: str) -> EngineChanged:
        entry = self.entries.entry(url)
        return EngineChanged("not_wanted", f"{entry.source} wants it: it stays", entry)

    def level(self) -> LevelShown:
        """Return the log level."""
        return LevelShown(self._log.level, self._log.level_set_by)

    def set_level(self, fields: Mapping[str, Any]) -> LevelShown:
        """Have another log level used at once.

        Raises:
            BadRequestError: there is no such level.
        """
        try:
            order = msgspec.convert(conform(dict(fields), LogLevelOrder, ""), LogLevelOrder)
        except SettingsError as error:
            raise refusal(error) from None
        self._set_log_level(order.level)
        return self.level()


def _refuse_files(plain: Mapping[str, Any]) -> None:
    for path in _FILES:
        value: object = plain
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            raise BadRequestError(
                f"{'.'.join(path)}: files of this machine can be named in the settings only"
            )
