"""Bootstrap servers with several workers: the scheduler process asks them, and publishes what they
answer.

The prompts that any worker has given up while decode engines wait for their KV count together: they
keep the same few threads of a prefill engine busy. A new scheduler process is told by workers what
servers have answered, so that it has pairs before it has asked.
"""

from __future__ import annotations

from pdproxy.fleet.bootstrap import Bootstraps, KnownServer
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.workers.calls import told
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks

_TOPIC = "bootstrap servers"
"""Behind these words, the topic of the servers of a pool has the pool's number."""


class BootstrapsForWorkers:
    """Has workers know what servers answer to this process, in the pool with number `pool`."""

    def __init__(
        self, links: SchedulerLinks, pool: int, own: Bootstraps, engines: EngineRegistry
    ) -> None:
        self._own = own
        self._engines = engines
        topic = links.publisher.topic(f"{_TOPIC} {pool}", self._of, engines.keys)
        topic.restore_by(KnownServer, lambda _, known: own.restore(known))
        own.changed = lambda engine: topic.changed(engine.url)
        links.serve(BootstrapsForWorkers, self, pool)

    def __repr__(self) -> str:
        return f"<BootstrapsForWorkers {self._own!r}>"

    def _of(self, url: str) -> KnownServer | None:
        engine = self._engines.get(url)
        return None if engine is None else self._own.of(engine)

    @told
    def gave_up(self, url: str) -> None:
        """An engine has given up a prompt."""
        if (engine := self._engines.get(url)) is not None:
            self._own.gave_up(engine)


class BootstrapsOfWorker:
    """Has the bootstraps of a worker know what it is told: it asks no server. A watcher of
    engines.
    """

    def __init__(
        self, link: SchedulerLink, pool: int, own: Bootstraps, engines: EngineRegistry
    ) -> None:
        self._own = own
        self._engines = engines
        topic, gave_up = f"{_TOPIC} {pool}", BootstrapsForWorkers.gave_up
        self._told = link.subscriber.subscribe(topic, KnownServer, lambda _, now: own.follow(now))
        self._told.retained = lambda: self._told.values
        own.keep_asking = self._came_up
        own.when_given_up = lambda engine: link.tell(gave_up, pool, engine.url)
        engines.watch(self)

    def __repr__(self) -> str:
        return f"<BootstrapsOfWorker {self._own!r}>"

    def added(self, engine: Engine) -> None:
        """Do nothing: what was told counts once the engine is up."""

    def removed(self, engine: Engine) -> None:
        """Forget what was told of an engine, unless only its settings change."""
        if engine.url != self._engines.replaced:
            self._told.values.pop(engine.url, None)

    def _came_up(self, engine: Engine) -> None:
        now = self._told.values.get(engine.url)
        # without a start time it may be of the run before
        if now is not None and (now.started or not self._own.has_asked(engine)):
            self._own.follow(now)
