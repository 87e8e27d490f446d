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
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks


def publish_bootstraps(
    links: SchedulerLinks, topic: str, own: Bootstraps, engines: EngineRegistry
) -> None:
    """Have workers know what servers answer to this process. Workers say the URLs of engines that
    have given up a prompt.
    """

    def of(url: str) -> KnownServer | None:
        engine = engines.get(url)
        return None if engine is None else own.of(engine)

    def gave_up(url: str) -> None:
        if (engine := engines.get(url)) is not None:
            own.gave_up(engine)

    made = links.publisher.topic(topic, of, engines.keys)
    made.restore_by(KnownServer, lambda _, told: own.restore(told))
    own.changed = lambda engine: made.changed(engine.url)
    links.hears[topic] = lambda _, body: gave_up(body.decode())


class BootstrapsOfWorker:
    """Has the bootstraps of a worker know what it is told: it asks no server. A watcher of
    engines.
    """

    def __init__(
        self, link: SchedulerLink, topic: str, own: Bootstraps, engines: EngineRegistry
    ) -> None:
        self._own = own
        self._engines = engines
        self._told = link.subscriber.subscribe(topic, KnownServer, lambda _, told: own.follow(told))
        self._told.retained = lambda: self._told.values
        own.keep_asking = self._came_up
        own.when_given_up = lambda engine: link.say(topic, engine.url.encode())
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
        told = self._told.values.get(engine.url)
        # without a start time it may be of the run before
        if told is not None and (told.started or not self._own.has_asked(engine)):
            self._own.follow(told)
