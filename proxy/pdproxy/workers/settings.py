"""Settings of several workers: the scheduler process follows their files, and tells workers what is
in force. What can't be used is said once, by that process.

The supervisor keeps it, too: a process that is started again begins with what was in force,
whatever the files are like.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from pdproxy.app.reloading import Uses, told_of
from pdproxy.fleet.member import MembershipError
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings, of_worker
from pdproxy.workers.kept import Keeper
from pdproxy.workers.publisher import Publisher
from pdproxy.workers.subscriber import Subscriber

logger = logging.getLogger("pdproxy.settings")

SETTINGS = "settings"
"""The topic, and the key of what the supervisor keeps: the settings in force, all of them."""

decode_settings = msgspec.msgpack.Decoder(Settings).decode


class SettingsForWorkers:
    """Uses settings in the scheduler process, by `own`, and tells workers of them. `in_force`:
    those of now; `keeper`: has the supervisor keep them.
    """

    def __init__(self, own: Uses, in_force: Settings, publisher: Publisher, keeper: Keeper) -> None:
        self._own = own
        self._in_force = in_force
        self._topic = publisher.topic(SETTINGS, lambda _: self._in_force, keeper=keeper)

    def __repr__(self) -> str:
        return f"<SettingsForWorkers by {self._own!r}>"

    def use(self, old: Settings, new: Settings) -> None:
        """See `Uses`."""
        self._own.use(old, new)
        if new != old:
            self._in_force = new
            self._topic.changed()


class SettingsOfWorker:
    """Uses what a worker is told, by `own`: its part of the settings of so many `workers`.
    `in_force`: those of now, of all; `ends`: whether the worker is shutting down.
    """

    def __init__(
        self,
        own: Uses,
        in_force: Settings,
        workers: int,
        subscriber: Subscriber,
        ends: Callable[[], bool],
    ) -> None:
        self._own = own
        self._in_force = of_worker(in_force, workers)
        self._workers = workers
        self._ends = ends
        self._failure: str | None = None
        subscriber.subscribe(SETTINGS, Settings, self._take)

    def __repr__(self) -> str:
        return f"<SettingsOfWorker: {self._failure or 'good'}>"

    def shortcomings(self) -> list[str]:
        """Return why this worker does not use the settings that are in force, a sentence or
        none.
        """
        return (
            [] if self._failure is None else [f"new settings can't be used here: {self._failure}"]
        )

    def _take(self, _: str, told: Settings) -> None:
        new = of_worker(told, self._workers)
        if self._ends():
            return
        try:
            if new != self._in_force:
                self._own.use(self._in_force, new)
        except (SettingsError, MembershipError, ValueError) as error:
            self._failure = told_of(error)
            logger.error("new settings can't be used here, nothing changes: %s", self._failure)  # noqa: TRY400
        else:
            self._in_force, self._failure = new, None
