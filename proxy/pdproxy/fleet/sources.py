"""Sources of engines while the proxy runs: what finds engines, and the part of the membership that
each has.

A source knows nothing of pools: it says where engines are, whenever it has looked. `FoundEngines`
has the pool follow. What a source can't find out, or what can't be used of it, changes nothing, and
leaves the engines of other sources alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import msgspec

from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import Membership
from pdproxy.kit.errors import Wait
from pdproxy.kit.text import truncate
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.engines import BY_LABEL, ConfiguredEngine, Role, engine_url
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv import ReceiverSettings
from pdproxy.settings.schema import SOURCES, Settings, source_kind

POD = "pod"
"""The label of an engine that has the name of its pod."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that a source has found. `labels` are added to those of the settings.

    `role`: what it is where the settings say `by_label`; None: it does not say, `no_role` has the
    reason.

    `ready`: one that is not ready does not join the pool, but stays if it is there already: only
    health checks decide whether an engine is up. `identity`: another one behind the same URL is
    another engine; "": the URL alone says which engine it is.
    """

    url: str
    role: Role | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ready: bool = True
    identity: str = ""
    no_role: str = ""


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What a source has found. `engines`: all that it knows; None: it could not find out, and the
    last answer stays in use.

    `problem`: what is wrong, in a few words, None if nothing is. `passed`: the deadline that has
    ended the wait for it. `left_out`: what can't be an engine, a sentence each.
    """

    engines: Sequence[FoundEngine] | None
    problem: str | None = None
    passed: Wait | None = None
    left_out: Sequence[str] = ()


class EngineSource(Protocol):
    """Finds engines."""

    async def run(self, answered: Callable[[SourceAnswer], None]) -> None:
        """Say what is found, at the start and whenever it may have changed, until cancelled.

        `answered` ends the task of a source that was given up. One that fails is started again
        after a pause; its engines stay.
        """


def source_of(url: str, settings: Settings) -> EngineSource:
    """Return the source that the URL of a engine names.

    It is made by the function `source` of the module `pdproxy.fleet.KIND_source`, with the same
    arguments. The module is imported here: only a proxy with such engines needs what it imports.

    Raises:
        SettingsError: it can't be made, since a file can't be read, for example.
    """
    source: EngineSource = import_module(f"pdproxy.fleet.{source_kind(url)}_source").source(
        url, settings
    )
    return source


def nowhere(url: str) -> str | None:
    """Return the name of another pool that an engine is in, where there is no other pool."""
    return None


class FoundEngines:
    """The engines of one source in one pool. `engine`: their settings, whose URL is the source's.

    `elsewhere`: returns the name of another pool that has an engine, None if none has it.
    `are_new`: the engines of the first answer begin slowly, too: others serve already.
    """

    def __init__(
        self,
        engine: ConfiguredEngine,
        membership: Membership,
        observers: Observers,
        now: Callable[[], float],
        elsewhere: Callable[[str], str | None] = nowhere,
        *,
        are_new: bool = False,
    ) -> None:
        self.name, self.kind = engine.url, source_kind(engine.url) or ""
        self.template = engine
        self._membership = membership
        self._observers = observers
        self._now = now
        self._elsewhere = elsewhere
        self._are_new = are_new
        self._logger = logging.getLogger(f"pdproxy.{self.kind}")
        self._had: dict[str, ConfiguredEngine] | None = None
        """The engines that the pool has of it, None before the first answer that could be used."""
        self._problem: str | None = None
        self._problem_since = 0.0
        self._left_out: list[str] = []
        self._is_over = False
        self._identities: dict[str, str] = {}
        """By the URLs of the last answer."""
        self._answer = SourceAnswer(())
        """The last one with engines."""
        self.answered_at: float | None = None
        """When the last answer with engines came."""
        self.counts: Counter[str] = Counter()
        """Answers by their result, as in pdproxy_source_answers_total."""

    def __repr__(self) -> str:
        return f"<FoundEngines of {self.name}: {self.count}>"

    @property
    def count(self) -> int:
        """How many engines the last answer has."""
        return len(self._answer.engines or ())

    @property
    def left_out(self) -> int:
        """How many of what was found can't be used."""
        return len(self._left_out)

    def shortcomings(self) -> list[str]:
        """Return what is wrong with it, a sentence each."""
        found = []
        if self._problem is not None:
            kept = "its last answer stays in use" if self._had else "no engine of it is known"
            found.append(
                f"{self.name}: {self._problem}, for {self._now() - self._problem_since:.0f} s: "
                f"{kept}"
            )
        elif self.answered_at is None:
            found.append(f"{self.name}: has not been answered yet")
        return found + [f"{self.name}: {text}" for text in self._left_out]

    def use(self, engine: ConfiguredEngine) -> None:
        """Have its engines with other settings from now on. What fails changes nothing.

        Raises:
            SettingsError: an engine can't work with them.
            MembershipError: as there.
        """
        before, self.template = self.template, engine
        try:
            if self._had is not None:
                self._have(are_settings_new=True)
        except Exception:
            self.template = before
            raise

    def give_up(self) -> None:
        """Want no engine any more: what it alone wants is drained and removed. An answer that comes
        now changes nothing.
        """
        self._is_over = True
        self._membership.apply(self.name, ())

    def answered(self, answer: SourceAnswer) -> None:
        """Have the engines of an answer.

        Raises:
            CancelledError: it was given up. Libraries may lose the cancellation that comes together
                with an answer.
        """
        if self._is_over:
            raise asyncio.CancelledError
        if answer.passed is not None:
            self._observers.notify(DeadlinePassed(answer.passed.value))
        wrong = answer.problem
        if answer.engines is None:
            self.counts["failed"] += 1
        else:
            self._answer, self.answered_at = answer, self._now()
            if not answer.engines:
                wrong = wrong or "names no engine"
            wrong = self._apply() or wrong
        self._note(wrong)

    def _apply(self) -> str | None:
        """Have the engines of the last answer. Return why that is not possible."""
        before = self._had
        try:
            most = SOURCES[self.kind].most
            if self.count > most:
                raise SettingsError(f"names {self.count} engines: {most} at most")
            had = self._have()
        except (SettingsError, MembershipError, ValueError) as error:
            self.counts["failed"] += 1
            return truncate(error)
        self.counts["empty" if not had else "same" if before == had else "changed"] += 1
        return None

    def _have(self, *, are_settings_new: bool = False) -> dict[str, ConfiguredEngine]:
        """Have the engines of the last answer, and return them: all but those that can't be used,
        or that others have. `are_settings_new`: settings with which an engine of the pool can't be
        used are refused.
        """
        wanted, left_out = dict[str, ConfiguredEngine](), list(self._answer.left_out)
        for found in self._answer.engines or ():
            if self.template.role == BY_LABEL and found.role is None:
                left_out.append(found.no_role)
                continue
            engine, joins = self._engine(found), self._joins(found)
            # behind it: what was another engine may be that of another source alone now
            if (why := self._why_not(found, engine)) is not None:
                left_out.append(why)
            elif joins:
                wanted[found.url] = engine
        members, there = self._membership.members, {one.url for one in self._answer.engines or ()}
        self._identities = {
            url: identity
            for url, identity in self._identities.items()
            if url in there or url in members
        }
        are_new = self._are_new or self._had is not None
        try:
            self._membership.apply(self.name, list(wanted.values()), are_new=are_new)
        except SettingsError:
            wrong = self._membership.unusable(wanted.values())
            if not wrong or len(wrong) == len(wanted):
                raise
            if are_settings_new and not wrong.keys().isdisjoint(self._membership.members):
                raise
            for url, why in wrong.items():  # these must not keep the others out
                del wanted[url]
                left_out.append(why)
            self._membership.apply(self.name, list(wanted.values()), are_new=are_new)
        self._had, self._left_out = wanted, left_out
        return wanted

    def _engine(self, found: FoundEngine) -> ConfiguredEngine:
        """Return the settings of an engine that was found."""
        template = self.template
        labels = {**template.labels, **found.labels}
        engine = msgspec.structs.replace(template, url=found.url, labels=labels)
        if template.role != BY_LABEL or found.role is None:
            return engine
        engine = msgspec.structs.replace(engine, role=found.role)
        # What the node's settings have for engines of one role means nothing for the others.
        if not engine.decodes:
            engine = msgspec.structs.replace(engine, sources=(), receiver=ReceiverSettings())
        if engine.role != "prefill":
            engine = msgspec.structs.replace(engine, serves_whole=False)
        return engine

    def _why_not(self, found: FoundEngine, engine: ConfiguredEngine) -> str | None:
        """Return why an engine that was found can't be one of this source."""
        if not _is_usable(found.url):
            return f"{truncate(found.url)} can't be an engine's URL"
        if (pool := self._elsewhere(found.url)) is not None:
            return f"{found.url} is an engine of pool {pool}"
        member = self._membership.members.get(found.url)
        if (
            member is None
            or member.leaves
            or member.source == self.name
            or member.settings == engine
        ):
            return None
        return f"{found.url} was added by {member.source}, with other settings"

    def _joins(self, found: FoundEngine) -> bool:
        """Return whether an engine is to be in the pool. One whose URL was another engine's is
        removed first: nothing of the other one is left.
        """
        url, member = found.url, self._membership.members.get(found.url)
        is_there = member is not None and member.is_wanted_by(self.name)
        is_own = is_there or (member is not None and member.source == self.name)  # it may leave
        before = self._identities.get(url)
        if before is None and member is not None:
            # a process before this one had it: of its identity, the name of its pod is known
            other = member.settings.labels.get(POD) != self._engine(found).labels.get(POD)
        else:
            other = before != found.identity
        if is_own and other:
            self._membership.remove(url, self.name, at_once=True)
            is_there = False
        self._identities[url] = found.identity
        return found.ready or is_there

    def _note(self, wrong: str | None) -> None:
        if wrong is not None and wrong != self._problem:
            if self._problem is None:
                self._problem_since = self._now()
            self._logger.warning("%s: %s", self.name, wrong)
        elif wrong is None and self._problem is not None:
            self._logger.info("%s is answered again", self.name)
        self._problem = wrong


def _is_usable(url: str) -> bool:
    """Return whether an engine can have a URL that was found. The targets of service records may be
    any bytes.
    """
    try:
        return engine_url(url, ("url",)) == url
    except SettingsError:
        return False
