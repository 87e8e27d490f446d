"""Settings that are read again while requests are served: when their files change, and at SIGHUP.

Owns the one task that looks at the files. What can't be used changes nothing: the log and `/ready`
say why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdproxy.fleet.member import MembershipError
from pdproxy.kit.reloading_file import stamp
from pdproxy.observe.description import Label, MergeRule, counter, gauge
from pdproxy.observe.events import Observers
from pdproxy.settings.changes import changes
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings

logger = logging.getLogger("pdproxy.settings")

LOOK_EVERY = 1.0
"""Seconds. A file is read once it was the same at two looks: an editor may be half-way."""
MAX_LINES = 3
"""Mistakes that are shown."""
RELOADS = (
    ("applied", "what has changed is in force, but for what needs a restart"),
    ("unchanged", "nothing has changed"),
    ("refused", "they can't be used: nothing has changed"),
)
RELOADED = counter(
    "pdproxy_settings_reloads_total",
    "reads",
    "How often the settings were read again, because a file has changed or at SIGHUP",
    Label("result", RELOADS),
)
REFUSED = gauge(
    "pdproxy_settings_refused",
    "bool",
    "Whether the settings could not be used when they were read last: then the former ones are in "
    "force, and the process could not start again",
    workers=MergeRule.MOST,
)


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Where the settings come from. `first`: what was read at the start.

    `read` reads all of it again, and raises SettingsError; `paths`: its files. `stamps`: theirs
    just before `first` was read, None: as they are now. Between that and the first look the engines
    may be asked for their connector for minutes.
    """

    first: Settings
    read: Callable[[], Settings]
    paths: Sequence[Path]
    stamps: Sequence[tuple[int, ...] | None] | None = None


class Uses(Protocol):
    """Puts settings in force."""

    def use(self, old: Settings, new: Settings) -> None:
        """Use new settings in place of old ones, or change nothing and raise SettingsError or
        MembershipError.
        """


class Reloading:
    """Has a proxy's settings follow their files. `live` puts them in force; `ends`: whether the
    proxy is shutting down.
    """

    def __init__(
        self, source: SettingsSource, live: Uses, ends: Callable[[], bool] = lambda: False
    ) -> None:
        self._read = self._in_force = source.first
        """As they were read last without a mistake, and those of them that are used."""
        self._source = source
        self._live = live
        self._ends = ends
        self._paths = [str(path) for path in source.paths]
        self._used = self._seen = self._stamps() if source.stamps is None else [*source.stamps]
        self._wake = asyncio.Event()
        self._failure: str | None = None
        self._restart: tuple[str, ...] = ()
        self._counts = dict.fromkeys((name for name, _ in RELOADS), 0)

    def __repr__(self) -> str:
        return f"<Reloading of {', '.join(self._paths)}: {self._failure or 'good'}>"

    def shortcomings(self) -> list[str]:
        """Return what of the files is not in force, a sentence each."""
        found = (
            [] if self._failure is None else [f"the settings can't be read again: {self._failure}"]
        )
        if self._restart:
            found.append(
                f"these settings have changed, and need a restart: {', '.join(self._restart)}"
            )
        return found

    def show(self, observers: Observers) -> None:
        """Show the metrics."""
        observers.show(RELOADED, lambda: [((name,), count) for name, count in self._counts.items()])
        observers.show(REFUSED, lambda: [((), float(self._failure is not None))])

    def soon(self) -> None:
        """Read the settings now: somebody asks for it."""
        self._wake.set()

    async def catch_up(self) -> None:
        """Read the files now if they have changed since the start."""
        if self._stamps() != self._used:
            await self.look(asked=True)

    async def run(self) -> None:
        """Look at the files once per second until cancelled."""
        while True:
            asked = False
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._wake.wait()
                self._wake.clear()
                asked = True
            except TimeoutError:
                pass
            await self.look(asked=asked)

    async def look(self, *, asked: bool = False) -> None:
        """Read the files if they have changed and are the same as at the last look, or if asked for
        it.
        """
        if self._ends():
            return
        stamps, before = self._stamps(), self._seen
        self._seen = stamps
        if not asked and (stamps == self._used or stamps != before):
            return
        self._used = stamps
        try:
            # YAML of hundreds of engines takes longer than a stream may wait.
            settings = await asyncio.get_running_loop().run_in_executor(None, self._source.read)
            result = self._apply(settings)
        except (SettingsError, MembershipError, ValueError) as error:
            self._failure = told_of(error)
            self._counts["refused"] += 1
            logger.error("the settings can't be read again, nothing changes: %s", self._failure)  # noqa: TRY400
        else:
            self._failure = None
            self._counts[result] += 1
            logger.info("the settings were read again: %s", result)

    def _apply(self, settings: Settings) -> str:
        wanted = changes(self._in_force, settings)
        self._live.use(self._in_force, wanted.used)
        if wanted.at_once:
            logger.info(
                "these settings have changed, and are used from now on: %s",
                ", ".join(wanted.at_once),
            )
        self._in_force = wanted.used
        changed, self._read = settings != self._read, settings
        former, self._restart = self._restart, wanted.restart
        if self._restart != former and self._restart:
            logger.warning(
                "these settings have changed, and need a restart: %s", ", ".join(self._restart)
            )
        return "applied" if changed else "unchanged"

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [stamp(path) for path in self._paths]


def told_of(error: Exception) -> str:
    """Return what is told of an error: its first mistakes."""
    return "; ".join(str(error).splitlines()[:MAX_LINES])
