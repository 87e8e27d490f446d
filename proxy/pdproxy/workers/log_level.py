"""The log level that an operator has set: the scheduler process tells it workers, and has it kept
for its successor.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.fleet.membership import ADMIN
from pdproxy.observe.logs import Log, set_level
from pdproxy.workers.kept import Keeper
from pdproxy.workers.publisher import Publisher
from pdproxy.workers.subscriber import Subscriber

LEVEL = "log_level"
"""The topic."""


class _Level(msgspec.Struct, array_like=True, frozen=True):
    """`instead_of`: the level of the settings whose place it takes."""

    level: str
    instead_of: str


_decode = msgspec.msgpack.Decoder(_Level).decode


def follow(subscriber: Subscriber, log: Log) -> None:
    """Have a worker use the level from now on."""
    subscriber.subscribe(LEVEL, _Level, lambda _, told: set_level(log, told.level, by=ADMIN))


class LevelOfAll:
    """The scheduler process's part. `log`: its own."""

    def __init__(self, publisher: Publisher, keeper: Keeper, log: Log) -> None:
        self._keeper = keeper
        self._log = log
        self._of_settings: Callable[[], str] = lambda: log.level
        self.changed = publisher.topic(LEVEL, self._level, keeper=keeper).changed
        """Tells workers of a level that was just set."""

    def take_over(self, of_settings: Callable[[], str]) -> None:
        """Use the level that was kept, unless the settings have another one than then.
        `of_settings` returns theirs.
        """
        self._of_settings = of_settings
        for kept in map(_decode, self._keeper.kept_of(LEVEL)):
            if kept.instead_of == self._of_settings():
                set_level(self._log, kept.level, by=ADMIN)

    def _level(self, _: str) -> _Level | None:
        """Return the level, None if no operator has set it."""
        log = self._log
        return _Level(log.level, self._of_settings()) if log.level_set_by == ADMIN else None
