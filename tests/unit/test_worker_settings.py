"""Settings that the scheduler process follows: workers use what they are told, and only that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.limits import Limits
from pdproxy.settings.listen import Listen
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings, of_worker
from pdproxy.workers import links
from pdproxy.workers.kept import Keeper, keep
from pdproxy.workers.links import Message
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.settings import (
    SETTINGS,
    SettingsForWorkers,
    SettingsOfWorker,
    decode_settings,
)
from tests.unit.test_remote_scheduler import settled

FIRST = Settings(listen=Listen(workers=2), limits=Limits(max_connections=100))
SECOND = replace(FIRST, limits=Limits(max_connections=200))
THIRD = replace(FIRST, limits=Limits(max_connections=300))


class Live:
    """What uses settings. `refuses`: those that it can't."""

    def __init__(self) -> None:
        self.used: list[tuple[Settings, Settings]] = []
        self.refuses: Callable[[Settings], bool] = lambda _: False

    def use(self, old: Settings, new: Settings) -> None:
        if self.refuses(new):
            raise SettingsError("no", "never")
        self.used.append((old, new))


class Worker:
    """A worker."""

    def __init__(self) -> None:
        self.live, self.link, self.ends = Live(), SchedulerLink(), False
        self.told = SettingsOfWorker(self.live, FIRST, 2, self.link.subscriber, lambda: self.ends)

    def connect(self, scheduler: SchedulerLinks) -> None:
        mine, its = links.pair()
        scheduler.connect(its)
        self.link.connect(mine)


def scheduler() -> tuple[SettingsForWorkers, SchedulerLinks, Live, dict[str, bytes]]:
    """The scheduler process, what it uses, and what the supervisor keeps."""
    made, live, kept = SchedulerLinks(chooses=True, workers=2), Live(), dict[str, bytes]()
    made.start()

    def send(message: Message) -> None:
        keep(kept, message)

    return SettingsForWorkers(live, FIRST, made.publisher, Keeper(send, kept)), made, live, kept


def part(settings: Settings) -> Settings:
    return of_worker(settings, 2)


async def test_workers_use_what_is_in_force_each_change_once() -> None:
    """Also one that connects later. The supervisor keeps the last."""
    own, its, live, kept = scheduler()
    first, late = Worker(), Worker()
    first.connect(its)
    await settled()
    assert not first.live.used, "it began with these"
    own.use(FIRST, SECOND)
    own.use(SECOND, SECOND)
    await settled()
    assert first.live.used == [(part(FIRST), part(SECOND))]
    assert part(SECOND).limits.max_connections == 100
    assert decode_settings(kept[SETTINGS]) == SECOND
    own.use(SECOND, THIRD)
    late.connect(its)
    await settled()
    assert late.live.used == [(part(FIRST), part(THIRD))]
    assert first.live.used[1:] == [(part(SECOND), part(THIRD))]
    assert live.used == [(FIRST, SECOND), (SECOND, SECOND), (SECOND, THIRD)]
    its.stop()
    for one in (first, late):
        one.link.close()


async def test_what_the_scheduler_process_can_not_use_is_told_to_nobody() -> None:
    own, its, live, kept = scheduler()
    worker = Worker()
    worker.connect(its)
    live.refuses = lambda _: True
    with pytest.raises(SettingsError):
        own.use(FIRST, SECOND)
    await settled()
    assert (worker.live.used, kept) == ([], {})
    its.stop()
    worker.link.close()


async def test_a_worker_that_can_not_use_them_says_so_until_it_can() -> None:
    own, its, _, _ = scheduler()
    worker = Worker()
    worker.connect(its)
    worker.live.refuses = lambda new: new == part(SECOND)
    own.use(FIRST, SECOND)
    await settled()
    assert worker.told.shortcomings() == ["new settings can't be used here: no; never"]
    own.use(SECOND, THIRD)
    await settled()
    assert worker.live.used == [(part(FIRST), part(THIRD))]
    assert worker.told.shortcomings() == []
    worker.ends = True
    own.use(THIRD, FIRST)
    await settled()
    assert len(worker.live.used) == 1, "a worker that drains changes nothing"
    its.stop()
    worker.link.close()


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
async def test_all_settings_arrive_as_they_are(path: Path) -> None:
    given = load(path, {})
    own, its, _, kept = scheduler()
    own.use(FIRST, given)
    await settled()
    assert decode_settings(kept[SETTINGS]) == given
    its.stop()
