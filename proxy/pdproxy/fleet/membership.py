"""Membership of a pool at run time: engines are added, drained, used again and removed here, and
nowhere else.

Owns the members, and one task for each engine that is on its way out. Who wants engines in the pool
is a source: the settings, an operator. A source removes only what it has added itself.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.member import Drain, Member, MembershipError, MemberState, UnknownMemberError
from pdproxy.kit.errors import EngineTimeoutError, Wait
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import DeadlinePassed, MemberChanged, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.limits import Deadlines

logger = logging.getLogger("pdproxy.fleet")

LOOK = 0.25
"""Seconds between two looks at an engine that is on its way out."""
LAST = 5.0
"""Seconds in which legs end that were told to."""
MAX_MEMBERS = 4096
DRAINING, DRAINED = "is being drained", "is drained"
"""Why an engine gets no requests, as the ledger notes it."""
SETTINGS = "settings"
"""The source of the engines that files, flags and variables name."""
ADMIN = "admin"
"""The source of the engines that an operator adds by the admin API."""
CHANGES = (
    ("added", "an engine was added while the proxy runs"),
    ("draining", "it gets no more requests"),
    ("drained", "nothing is left of its requests; it stays until it is undrained or removed"),
    ("undrained", "it gets requests again"),
    ("replaced", "its settings have changed"),
    ("removed", "it was removed"),
)
MEMBER_CHANGES = counter(
    "pdproxy_member_changes_total",
    "changes",
    "Changes of the pool's engines while the proxy runs",
    Label("change", CHANGES),
    of=MemberChanged,
)


class Setup(Protocol):
    """Makes an engine with all that belongs to it, and takes it apart."""

    def checked(self, engine: ConfiguredEngine) -> ConfiguredEngine:
        """Return the settings of an engine that is to be added, in their normal spelling. Raises
        SettingsError.
        """

    def checked_all(self, engines: Sequence[ConfiguredEngine]) -> list[ConfiguredEngine]:
        """Do so for engines that are to be added together. Raises SettingsError."""

    def add(self, engine: ConfiguredEngine, *, is_checked: bool = False) -> Engine:
        """Add an engine; `is_checked`: it was just checked. What fails changes nothing. Raises
        SettingsError, ValueError.
        """

    def remove(self, url: str) -> Engine:
        """Remove an engine. Legs to it go on."""


class Membership:
    """The members of one pool, by URL. A watcher of the registry.

    `deadlines`: how long an engine may take to drain. `leaving`: called with the URL of each engine
    that begins to drain: what is only kept in the hope of more requests is released then.
    """

    def __init__(
        self,
        setup: Setup,
        engines: EngineRegistry,
        ledger: Ledger,
        observers: Observers,
        tasks: TaskOwner,
        now: Callable[[], float],
        deadlines: Deadlines,
        leaving: Callable[[str], None] | None = None,
    ) -> None:
        self._setup = setup
        self._engines = engines
        self._ledger = ledger
        self._observers = observers
        self._tasks = tasks
        self._now = now
        self._deadlines = deadlines
        self._leaving = leaving
        self._members: dict[str, Member] = {}
        self._ending: dict[Member, asyncio.Task[None]] = {}
        self._forgetting: asyncio.Task[None] | None = None
        self.when_changed: Callable[[str], None] = lambda _: None
        """Called with the URL of each member of which something has changed, or that is none any
        more. It may not be there again yet.
        """
        engines.watch(self)
        ledger.when_up(self._came_up)

    def __repr__(self) -> str:
        return (
            f"<Membership {', '.join(f'{url} {self.state(url).value}' for url in self._members)}>"
        )

    # -- what is known

    @property
    def members(self) -> Mapping[str, Member]:
        """All members. Read only."""
        return self._members

    def state(self, url: str) -> MemberState:
        """Return the state of a member. Raises MembershipError for an unknown one."""
        return self._member(url).state(self._engines[url].in_ledger)

    def shortcomings(self) -> list[str]:
        """Return which engines get no requests since they are drained, a sentence each."""
        found = []
        for url, member in self._members.items():
            if (drain := member.drain) is None:
                continue
            engine = self._engines[url]
            name = f"{engine.in_ledger.role.value} {url}"
            if drain.over:
                found.append(
                    f"{name} is drained (by {drain.by}): it gets no requests until it is undrained"
                )
                continue
            left = max(0.0, drain.deadline - self._now())
            count = engine.in_ledger.requests
            rest = (
                f"{count} requests are left"
                if count
                else "KV of it is still to be read or released"
            )
            found.append(
                f"{name} is being drained (by {drain.by}): {rest}, for at most {left:.0f} s"
            )
        return found

    # -- changes

    def adopt(self, engines: Iterable[ConfiguredEngine], source: str = SETTINGS) -> None:
        """Take in the engines that were added before anything was served."""
        for engine in engines:
            self._members[engine.url] = Member(engine, source, self._now(), is_new=False)

    def have_served(self) -> None:
        """Note that all members have served by other processes before this one began: none begins
        slowly.
        """
        for member in self._members.values():
            member.is_new = False

    def add(self, engine: ConfiguredEngine, source: str) -> Member:
        """Add an engine for a source. One that is there already is kept, and used again if it was
        about to leave.

        Raises:
            SettingsError: it can't work in this pool.
            MembershipError: it is there with other settings, or there are too many.
        """
        if (known := self._members.get(engine.url)) is None or known.settings != engine:
            engine = self._setup.checked(engine)
            known = self._members.get(engine.url)
        if known is not None:
            self._add_again(known, engine, source)
            return known
        return self._add_new(engine, source)

    def _add_new(self, engine: ConfiguredEngine, source: str) -> Member:
        if len(self._members) >= MAX_MEMBERS:
            raise MembershipError(f"there are {MAX_MEMBERS} engines already")
        self._setup.add(engine, is_checked=True)
        member = self._members[engine.url] = Member(engine, source, self._now())
        self._report(member, "added", source)
        return member

    def _add_again(self, known: Member, engine: ConfiguredEngine, source: str) -> None:
        if known.settings != engine and not known.leaves:
            raise MembershipError(
                f"{engine.url} was added by {known.source}, with other settings", known.source
            )
        if known.settings != engine:
            self._replace(known, engine)
        elif known.leaves:
            self.undrain(engine.url, source)
        else:
            known.claim(source)
            self.when_changed(known.url)
            return
        known.source = source
        known.heirs.discard(source)
        self.when_changed(known.url)

    def drain(
        self, url: str, by: str, *, seconds: float | None = None, removes: bool = False
    ) -> None:
        """Give an engine no more requests. Those that it has may take `seconds`; `removes`: then it
        leaves.

        What draws on an engine's KV counts as well. Behind the deadline its legs end as if it had
        failed: other engines serve requests without data, and go on with streams where they can.
        Draining twice only adds to the first.

        Raises:
            MembershipError: there is no such member.
        """
        member, now = self._member(url), self._now()
        drain = Drain(
            by, now, now + (self._deadlines.engine_drain if seconds is None else seconds), removes
        )
        if member.begin_drain(drain):
            self._ledger.mark_draining(url, DRAINING)
            if self._leaving is not None:
                self._leaving(url)
            self._report(member, "draining", by)
        else:
            self.when_changed(url)
        self._go_on(member)

    def _go_on(self, member: Member) -> None:
        if member not in self._ending:
            self._ending[member] = self._tasks.spawn(self._end(member), f"drain {member.url}")

    def undrain(self, url: str, by: str) -> None:
        """Give an engine requests again.

        Raises:
            MembershipError: there is no such member, or it is not being drained.
        """
        member = self._member(url)
        member.end_drain()
        if (task := self._ending.pop(member, None)) is not None:
            task.cancel()
        self._ledger.mark_draining(url, None)
        if member.is_new and self._engines[url].in_ledger.up:  # it was restarted meanwhile
            self._begin_slowly(member)
        self._report(member, "undrained", by)

    def remove(
        self, url: str, source: str, *, at_once: bool = False, seconds: float | None = None
    ) -> bool:
        """Have an engine drained and removed, which a source does not want any more. Return whether
        nobody does.

        `at_once`: it is removed now; legs to it go on. `seconds`: see `drain`.

        Raises:
            MembershipError: there is no such member, or the source has not added it.
        """
        member = self._member(url)
        if not member.disclaim(source):
            self.when_changed(url)
            return False
        if at_once:
            self._remove(member, source)
        else:
            self.drain(url, source, seconds=seconds, removes=True)
        return True

    def apply(
        self, source: str, wanted: Sequence[ConfiguredEngine], *, are_new: bool = True
    ) -> None:
        """Have exactly these engines of a source. What fails changes nothing. `are_new`: those that
        are added begin slowly.

        An engine whose settings have changed is replaced at once: it is the same process, and legs
        to it go on.

        Raises:
            SettingsError: one of them can't work in this pool.
            MembershipError: another source has added one with other settings, or there are too
                many.
        """
        by_url = {engine.url: engine for engine in wanted}
        changed = [
            member
            for url, member in self._members.items()
            if url in by_url and member.settings != by_url[url]
        ]
        for member in changed:
            if member.source != source and not member.leaves:
                raise MembershipError(
                    f"{member.url} was added by {member.source}, with other settings", member.source
                )
        # Prefill engines first: decode engines may name them as sources.
        new = sorted(
            (engine for url, engine in by_url.items() if url not in self._members),
            key=lambda one: not one.prefills,
        )
        new = self._setup.checked_all(new)
        added: list[str] = []
        replaced: list[tuple[Member, ConfiguredEngine, Drain | None]] = []
        try:
            for engine in new:
                member = self._add_new(engine, source)
                member.is_new = are_new
                added.append(member.url)
            for member in changed:
                before = (member, member.settings, member.drain)
                self._replace(member, by_url[member.url])
                replaced.append(before)
        except Exception:
            for member, settings, drain in replaced:
                self._put_back(member, settings, drain)
            for url in added:
                self._remove(self._members[url], source)
            raise
        for engine in by_url.values():  # from here nothing fails: those that were to leave stay
            member = self._members[engine.url]
            if member in changed:
                member.source = source
                member.heirs.discard(source)
                self.when_changed(member.url)
            else:
                self.add(engine, source)
        for url, member in list(self._members.items()):
            if url not in by_url and member.is_wanted_by(source):
                self.remove(url, source)

    def unusable(self, engines: Iterable[ConfiguredEngine]) -> dict[str, str]:
        """Return those of some engines that can't work in this pool, each with the reason."""
        found: dict[str, str] = {}
        for engine in engines:
            member = self._members.get(engine.url)
            if member is None or member.settings != engine:
                try:
                    self._setup.checked(engine)
                except SettingsError as error:
                    found[engine.url] = str(error)
        return found

    def _replace(self, member: Member, engine: ConfiguredEngine) -> None:
        """Make an engine anew, with other settings. If that fails, it is as it was.

        It is the same process, of which a probe has shown what it is: it serves on at once.
        """
        drain = member.drain
        try:
            self._make_anew(member, engine)
        except Exception:
            if drain is not None and member.url in self._members:
                self._drain_again(member, drain)
            raise
        if drain is not None and not drain.removes:  # an operator works on it
            self._drain_again(member, drain)
        self._report(member, "replaced", member.source)

    def _make_anew(self, member: Member, engine: ConfiguredEngine) -> None:
        """Do so, and end its drain."""
        self._setup.checked(engine)
        self._engines.replaced, before = member.url, copy.copy(self._engines[member.url].in_ledger)
        old = self._setup.remove(member.url)
        try:
            self._made_again(self._setup.add(engine), old, before)
            member.settings = engine
        except Exception:
            self._made_again(self._setup.add(member.settings), old, before)
            self._members[member.url] = member
            raise
        finally:
            self._engines.replaced = None
        self._members[member.url] = member

    def _put_back(self, member: Member, engine: ConfiguredEngine, drain: Drain | None) -> None:
        try:
            self._replace(member, engine)
        except Exception as error:  # its key file was deleted, for example: it serves on as it is
            logger.error("%s keeps its new settings: %s", member.url, error)  # noqa: TRY400
        if drain is not None and member.drain is None:
            self._drain_again(member, drain)

    def _drain_again(self, member: Member, drain: Drain) -> None:
        left = max(0.0, drain.deadline - self._now())
        self.drain(
            member.url, drain.by, seconds=left if drain.removes else None, removes=drain.removes
        )

    def _made_again(self, engine: Engine, old: Engine, before: LedgerEngine) -> None:
        if old.buffer is not None and engine.buffer is not None:  # what is in it is still there
            old.buffer.capacity = engine.buffer.capacity
            # or it would be needed for as long as the new one is used
            engine.buffer, old.buffer = old.buffer, None
        if old.in_ledger.up and old.in_ledger.evidence is not None:
            self._ledger.mark_up(engine.url, old.in_ledger.evidence)
            # what waits there for KV still does
            engine.in_ledger.run_number = old.in_ledger.run_number
            reason = "its settings have changed"
            self._observers.notify(
                NodeChanged(engine.url, engine.in_ledger.role.value, up=True, reason=reason)
            )
        if engine.in_ledger.role is before.role:
            engine.in_ledger.window = before.window
            self._ledger.breakers.take_over(engine.in_ledger, before)

    def _remove(self, member: Member, by: str) -> None:
        self._report(member, "removed", by)
        self.take_out(member.url)

    # -- having what was decided before, or by others

    def put(
        self,
        settings: ConfiguredEngine,
        source: str,
        heirs: Iterable[str],
        since: float,
        drain: Drain | None,
    ) -> None:
        """Have a member as it is given, in place of what is known of it. Nothing is reported, and
        nobody ends its drain: see `go_on`.

        Raises:
            SettingsError: a file of its key or certificates can't be used. Nothing has changed.
        """
        member = self._members.get(settings.url)
        if member is None:
            self._setup.add(settings, is_checked=True)
            member = self._members[settings.url] = Member(settings, source, since, is_new=False)
        elif member.settings != settings:
            self._make_anew(member, settings)
        member.source, member.since, member.heirs = source, since, OrderedSet()
        for heir in heirs:
            member.heirs.add(heir)
        self._put_drain(member, drain)
        self.when_changed(member.url)

    def _put_drain(self, member: Member, drain: Drain | None) -> None:
        url, before = member.url, member.drain
        member.drain = drain
        why = None if drain is None else DRAINED if drain.over else DRAINING
        engine = self._engines[url]
        if engine.in_ledger.draining != why:
            self._ledger.mark_draining(url, why)
        if drain is not None and before is None and self._leaving is not None:
            self._leaving(url)
        if drain is not None and drain.cut and (before is None or not before.cut):
            self._end_legs(engine)

    def go_on(self) -> None:
        """End the drains of all members."""
        for member in self._members.values():
            if member.drain is not None and not member.drain.over:
                self._go_on(member)

    def take_out(self, url: str) -> Engine:
        """Have a member no more, whoever wants it. Legs to it go on. Nothing is reported.

        Raises:
            KeyError: there is no such engine.
        """
        engine = self._setup.remove(url)
        self.when_changed(url)
        return engine

    def _forget_drain(self, member: Member) -> None:
        task, member.drain = self._ending.pop(member, None), None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # -- what happens to engines

    def added(self, engine: Engine) -> None:
        """Nothing is to be done: it is probed."""

    def removed(self, engine: Engine) -> None:
        """It is no member any more. Look from time to time whether anything still needs it, and
        then forget it.
        """
        if (member := self._members.pop(engine.url, None)) is not None:
            self._forget_drain(member)
        if self._forgetting is None or self._forgetting.done():
            self._forgetting = self._tasks.spawn(self._forget(), "forget engines")

    def _came_up(self, url: str, restarted: bool) -> None:
        """Have an engine that comes, or comes back, while others serve begin slowly: once it may
        get requests.
        """
        if (member := self._members.get(url)) is None:
            return
        member.is_new = member.is_new or restarted
        if member.is_new and member.drain is None:
            self._begin_slowly(member)

    def _begin_slowly(self, member: Member) -> None:
        member.is_new = False
        engine = self._engines[member.url]
        others = (other.in_ledger for other in self._engines.values() if other is not engine)
        if any(
            ledger_engine.available and ledger_engine.role is engine.in_ledger.role
            for ledger_engine in others
        ):
            member.warming = True
            self._ledger.breakers.warm_up(engine.in_ledger, self._now())

    # -- on the way out

    async def _end(self, member: Member) -> None:
        """Wait until nothing is left of an engine's work, end what is late, and let it go."""
        drain, engine = member.drain, self._engines[member.url]
        assert drain is not None
        while self._engines.needed(engine):
            now = self._now()
            if now >= drain.deadline + LAST:
                break  # what is left has deadlines of its own
            if now >= drain.deadline and not drain.cut:
                drain.cut = True
                self._cut(engine)
            await asyncio.sleep(LOOK)
        if drain.removes:
            self._remove(member, drain.by)
            return
        drain.over = True
        del self._ending[member]
        self._ledger.mark_draining(member.url, DRAINED)
        self._report(member, "drained", drain.by)

    def _cut(self, engine: Engine) -> None:
        self._observers.notify(DeadlinePassed(Wait.ENGINE_DRAIN.value, engine.url))
        self._end_legs(engine)
        self.when_changed(engine.url)

    @staticmethod
    def _end_legs(engine: Engine) -> None:
        legs = [*engine.open_legs.legs]
        ended = f": {len(legs)} legs are ended" if legs else ""
        logger.warning("%s is not drained in time%s", engine.url, ended)
        for leg in legs:
            leg.fail(
                EngineTimeoutError(f"{engine.url} is drained and leaves", wait=Wait.ENGINE_DRAIN)
            )

    async def _forget(self) -> None:
        while self._engines.forget_idle():  # noqa: ASYNC110 - leases are closed too often for a signal
            await asyncio.sleep(LOOK)

    def _member(self, url: str) -> Member:
        member = self._members.get(url)
        if member is None:
            raise UnknownMemberError(f"{url} is no engine of this pool")
        return member

    def _report(self, member: Member, change: str, by: str) -> None:
        settings = member.settings
        self._observers.notify(
            MemberChanged(member.url, settings.role, change, by, settings.labels.get("pod"))
        )
        self.when_changed(member.url)
