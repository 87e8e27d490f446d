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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import msgspec

from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import Membership
from pdproxy.kit.errors import Wait
from pdproxy.kit.text import truncate
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.engines import ConfiguredEngine, engine_url
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings, source_kind
from pdproxy.settings.sources import MAX_ENGINES


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What a source has found. `urls`: of all its engines; None: it could not find out, and the
    last answer stays in use.

    `problem`: what is wrong, in a few words, None if nothing is. `passed`: the deadline that has
    ended the wait for it.
    """

    urls: Sequence[str] | None
    problem: str | None = None
    passed: Wait | None = None


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
        self.urls: tuple[str, ...] = ()
        """Those of the last answer."""
        self.answered_at: float | None = None
        """When the last answer with engines came."""
        self.counts: Counter[str] = Counter()
        """Answers by their result, as in pdproxy_source_answers_total."""

    def __repr__(self) -> str:
        return f"<FoundEngines of {self.name}: {len(self.urls)}>"

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
                self._have()
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
        if answer.urls is None:
            self.counts["failed"] += 1
        else:
            self.urls, self.answered_at = tuple(dict.fromkeys(answer.urls)), self._now()
            if not self.urls:
                wrong = wrong or "names no engine"
            wrong = self._apply() or wrong
        self._note(wrong)

    def _apply(self) -> str | None:
        """Have the engines of the last answer. Return why that is not possible."""
        before = self._had
        try:
            if (count := len(self.urls)) > MAX_ENGINES:
                raise SettingsError(f"names {count} engines: {MAX_ENGINES} at most")
            had = self._have()
        except (SettingsError, MembershipError, ValueError) as error:
            self.counts["failed"] += 1
            return truncate(error)
        self.counts["empty" if not had else "same" if before == had else "changed"] += 1
        return None

    def _have(self) -> dict[str, ConfiguredEngine]:
        """Have the engines of the last answer, and return them: all but those that others have."""
        wanted, left_out = dict[str, ConfiguredEngine](), list[str]()
        for url in self.urls:
            engine, member = (
                msgspec.structs.replace(self.template, url=url),
                self._membership.members.get(url),
            )
            if not _is_usable(url):
                left_out.append(f"{truncate(url)} can't be an engine's URL")
            elif (pool := self._elsewhere(url)) is not None:
                left_out.append(f"{url} is an engine of pool {pool}")
            elif (
                member is None
                or member.leaves
                or member.source == self.name
                or member.settings == engine
            ):
                wanted[url] = engine
            else:  # it must not keep the others out
                left_out.append(f"{url} was added by {member.source}, with other settings")
        are_new = self._are_new or self._had is not None
        self._membership.apply(self.name, list(wanted.values()), are_new=are_new)
        self._had, self._left_out = wanted, left_out
        return wanted

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
