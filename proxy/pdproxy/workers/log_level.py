"""The log level that an operator has set: the scheduler process tells it workers, and has it kept
for its successor.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.fleet.membership import ADMIN
from pdproxy.observe.logs import Log, set_level
from pdproxy.workers.kept import Keeper
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks

LEVEL = "log_level"
"""The topic."""


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """`instead_of`: the level of the settings whose place it takes."""

    level: str
    instead_of: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


def follow(link: SchedulerLink, log: Log) -> None:
    """Have a worker use the level from now on."""
    link.hears[LEVEL] = lambda body: set_level(log, body.decode(), by=ADMIN)


class LevelOfAll:
    """The scheduler process's part. `log`: its own."""

    def __init__(self, links: SchedulerLinks, keeper: Keeper, log: Log) -> None:
        self._links = links
        self._keeper = keeper
        self._log = log
        self._of_settings: Callable[[], str] = lambda: log.level
        links.greets.append(self._greet)

    def take_over(self, of_settings: Callable[[], str]) -> None:
        """Use the level that was kept, unless the settings have another one than then.
        `of_settings` returns theirs.
        """
        self._of_settings = of_settings
        for kept in map(_decode, self._keeper.kept_of(LEVEL)):
            if kept.instead_of == self._of_settings():
                set_level(self._log, kept.level, by=ADMIN)

    def changed(self) -> None:
        """Tell workers of a level that was just set."""
        level = self._log.level
        self._links.say(LEVEL, level.encode())
        self._keeper.keep(LEVEL, _encode(_Kept(level, self._of_settings())))

    def _greet(self, client: SchedulerClient) -> None:
        if self._log.level_set_by == ADMIN:
            client.say(LEVEL, self._log.level.encode())
