"""A worker takes no requests before the scheduler process has said that it knows the engines, and
goes on to take them while there is no scheduler process.
"""

from __future__ import annotations

from pdproxy.app.compose import Proxy
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.workers import links, starting
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.world import until

DNS = "dns://engines.test:8000"


async def test_a_worker_that_was_told_nothing_takes_no_requests() -> None:
    """The process that asks DNS has no answer yet, and waits as long as workers wait for it."""
    scheduler = Proxy.build(Settings(pools=(Pool(),)))
    worker = Proxy.build(Settings(pools=(Pool(),)))
    theirs, own = SchedulerLinks(chooses=True, workers=1), SchedulerLink()
    why: list[str | None] = [f"starting: {DNS} has not been answered yet"]
    scheduler.sources.why_starting = lambda: why[0]  # type: ignore[method-assign]
    starting.tell(theirs.publisher, scheduler)
    starting.follow(own.subscriber, worker)
    theirs.start()
    assert worker.readiness.not_taking() == starting.UNTOLD
    mine, its = links.pair()
    theirs.connect(its)
    own.connect(mine)
    await until(lambda: worker.readiness.not_taking() == why[0])
    why[0] = None
    scheduler.sources.when_found()
    await until(lambda: worker.readiness.not_taking() is None)
    theirs.stop()
    own.look()
    assert worker.readiness.not_taking() is None
    own.close()
    for proxy in (scheduler, worker):
        await proxy.stop()
