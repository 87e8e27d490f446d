"""What the admin API does with the engines of a pool. Owns what an engine that is added so may not have, and the answers' shapes.

All of it is synchronous: an answer says what is the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from pdproxy.fleet.entries import EngineEntry, Entries
from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import ADMIN, Membership
from pdproxy.kit.errors import BadRequestError
from pdproxy.observe.recent import Recent, RecentRequest
from pdproxy.settings.conform import conform
from pdproxy.settings.crosscheck import engine_url
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.probes import LogLevel
from pdproxy.settings.schema import Node
from pdproxy.settings.section import Section
from pdproxy.web.admin.errors import ConflictError, refusal

LASTS = "it stays until this process ends, also when the settings are read again: name it in the settings to keep it for longer"
_FILES = (("api_key_file",), ("tls", "ca"), ("tls", "certificate"), ("tls", "key"), ("facts", "profile"))
"""Settings of an engine that name files of this machine. Who may add engines need not be able to read them."""

DrainSeconds = Annotated[float, Meta(ge=0, le=604_800)]


class DrainOrder(Section, frozen=True):
    """How an engine is drained."""

    seconds: Annotated[
        DrainSeconds | None, Meta(description="until its requests are ended; null: deadlines.engine_drain")
    ] = None
    keep: Annotated[
        bool, Meta(description="whether it stays without requests until it is undrained; false: it is removed then")
    ] = True


class LogLevelOrder(Section, frozen=True):
    """The least severe record that is to be written."""

    level: LogLevel


class LevelShown(msgspec.Struct, frozen=True):
    """The least severe record that is written."""

    level: str
    set_by: Annotated[str, Meta(description="settings, or admin: who has set it last")]


class EngineChanged(msgspec.Struct, frozen=True):
    """What was done, and how the engine is now."""

    result: Annotated[
        str, Meta(description="added, wanted, serving_again, draining, undrained, removing, removed or not_wanted")
    ]
    note: Annotated[str, Meta(description="what that means, for people")]
    engine: Annotated[EngineEntry | None, Meta(description="null if it was removed")]


class EngineList(msgspec.Struct, frozen=True):
    """All engines of the pool, in the order in which they were added."""

    engines: list[EngineEntry]


class RequestList(msgspec.Struct, frozen=True):
    """The last requests that have ended, the newest first."""

    requests: list[RecentRequest]


class LevelHolder(Protocol):
    """Holds the log level that is in force."""

    level: str
    level_set_by: str


class AdminService:
    """One pool's. `decisions`: the last ones of its placement as JSON; `set_log_level(level)` has it used at once."""

    def __init__(
        self,
        membership: Membership,
        entries: Entries,
        recent: Recent,
        decisions: Callable[[], bytes],
        log: LevelHolder,
        set_log_level: Callable[[str], None],
    ) -> None:
        self._membership = membership
        self.entries = entries
        self.recent = recent
        self.decisions = decisions
        self._log = log
        self._set_log_level = set_log_level

    def found(self, name: str) -> EngineEntry:
        """Return one engine, by its id or URL.

        Raises:
            NotThereError: there is no such engine.
        """
        try:
            return self.entries.entry(self.entries.find(name))
        except MembershipError as error:
            raise refusal(error) from None

    def has(self, name: str) -> bool:
        """Return whether there is an engine of this id or URL that stays."""
        try:
            return not self._membership.members[self.entries.find(name)].leaves
        except MembershipError:
            return False

    def add(self, fields: Mapping[str, Any]) -> tuple[int, EngineChanged]:
        """Add an engine. Return the status with the answer: 201 if it is new.

        Raises:
            BadRequestError: its settings are wrong, or it can't work in this pool.
            ConflictError: it is there with other settings, or there are too many.
        """
        try:
            plain = conform(dict(fields), Node, "")
            _refuse_files(plain)
            node = msgspec.convert(plain, Node)
            node = msgspec.structs.replace(node, url=engine_url(node.url, ("url",)))
            before = self._membership.members.get(node.url)
            source, left = (None, False) if before is None else (before.source, before.leaves)
            member = self._membership.add(node, ADMIN)
        except (SettingsError, MembershipError) as error:
            raise refusal(error) from None
        entry = self.entries.entry(member.url)
        if source is None:
            return 201, EngineChanged("added", LASTS, entry)
        if left:
            return 200, EngineChanged(
                "serving_again", f"it was being removed by {source}, and serves again; {LASTS}", entry
            )
        note = (
            LASTS
            if source == ADMIN
            else f"{source} has added it; if that gives it up, it stays until this process ends"
        )
        return 200, EngineChanged("wanted", note, entry)

    def drain(self, name: str, fields: Mapping[str, Any]) -> EngineChanged:
        """Give an engine no more requests.

        Raises:
            NotThereError: there is no such engine.
            ConflictError: it is to be removed behind that, and another source has added it.
        """
        try:
            order = msgspec.convert(conform(dict(fields), DrainOrder, ""), DrainOrder)
            url = self.entries.find(name)
            if not order.keep:
                return self._removing(url, order.seconds)
            self._membership.drain(url, ADMIN, seconds=order.seconds)
        except (SettingsError, MembershipError) as error:
            raise refusal(error) from None
        return EngineChanged("draining", "it gets no more requests until it is undrained", self.entries.entry(url))

    def undrain(self, name: str) -> EngineChanged:
        """Give an engine requests again.

        Raises:
            NotThereError: there is no such engine.
            ConflictError: it is not being drained, or is being removed.
        """
        try:
            url = self.entries.find(name)
            member = self._membership.members[url]
            if member.leaves:
                raise ConflictError(f"{url} is being removed by {member.source}: add it to keep it", member.source)
            self._membership.undrain(url, ADMIN)
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
            url = self.entries.find(name)
            if not at_once:
                return self._removing(url, seconds)
            if self._membership.remove(url, ADMIN, at_once=True):
                return EngineChanged("removed", "its requests go on until they end", None)
        except MembershipError as error:
            raise refusal(error) from None
        return self._kept(url)

    def _removing(self, url: str, seconds: float | None) -> EngineChanged:
        if not self._membership.remove(url, ADMIN, seconds=seconds):
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
        value: Any = plain
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            raise BadRequestError(f"{'.'.join(path)}: files of this machine can be named in the settings only")
