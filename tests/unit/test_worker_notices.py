"""Notices come to the scheduler process, and are taken by the worker whose prompt they are about;
bounded, whoever sends them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from pdproxy.app.sockets import AddressToBind, listener_at
from pdproxy.kit.ids import worker_of
from pdproxy.observe.events import Event, KvNoticed, Observers
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.settings.errors import SettingsError
from pdproxy.upstream.notices import NoticeSocket
from pdproxy.wire.lmcache_telemetry import notices
from pdproxy.wire.notices import Notice, NoticeEvent
from pdproxy.workers import links
from pdproxy.workers.kept_sockets import KeptSockets
from pdproxy.workers.notices import (
    AT_ONCE,
    MAX_UNREAD,
    NoticesAtWorker,
    NoticesForWorkers,
    NoticesOfWorker,
)
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.clock import ManualClock
from tests.fakes.world import until

WORKERS = 2
SCHEDULER = 2


class Scheduler:
    """A scheduler process, with what it has taken itself and counted."""

    def __init__(self, *, is_read: bool = False) -> None:
        self.links = SchedulerLinks(chooses=True, workers=WORKERS)
        self.links.start()
        self.taken: list[str] = []
        self.counted: Counter[tuple[str, str]] = Counter()
        self.notices = NoticesForWorkers(
            self.links,
            0,
            SCHEDULER,
            WORKERS + 1,
            lambda notice: self.taken.append(notice.request_id),
            Observers([self]),
            is_read=is_read,
        )

    def notify(self, event: Event) -> None:
        if isinstance(event, KvNoticed):
            self.counted[event.event, event.result] += 1

    def receive(self, *ids: str) -> None:
        for request_id in ids:
            self.notices.receive(ready(request_id))


class Worker:
    """A worker, with what it has taken."""

    def __init__(self, number: int) -> None:
        self.link = SchedulerLink()
        self.taken: list[Notice] = []
        self.messages = 0
        self.failures: list[Exception] = []
        self.own = NoticesOfWorker(self.link, 0, number, self._take, self.failures.append)
        self.link.serve(NoticesAtWorker, self)

    def take(self, notices: Sequence[Notice]) -> None:
        """Count a message."""
        self.messages += 1
        self.own.take(notices)

    def _take(self, notice: Notice) -> None:
        if notice.request_id.endswith("bad"):
            raise ValueError(notice.request_id)
        self.taken.append(notice)

    @property
    def ids(self) -> list[str]:
        return [one.request_id for one in self.taken]

    def connect(self, scheduler: Scheduler) -> None:
        mine, its = links.pair()
        scheduler.links.connect(its)
        self.link.connect(mine)


@pytest.fixture
async def all_of_them() -> AsyncIterator[tuple[Scheduler, list[Worker]]]:
    scheduler, workers = Scheduler(), [Worker(number) for number in range(WORKERS)]
    for worker in workers:
        worker.connect(scheduler)
    await settled()
    yield scheduler, workers
    scheduler.links.stop()
    for worker in workers:
        worker.link.close()


Made = tuple[Scheduler, list[Worker]]


def ready(request_id: str, **more: object) -> Notice:
    return Notice(event=NoticeEvent.READY, request_id=request_id, **more)  # type: ignore[arg-type]


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_goes_to_the_worker_whose_id_it_has(all_of_them: Made) -> None:
    """In the order in which they came. What names no worker that there is stays where it is."""
    scheduler, (first, second) = all_of_them
    strange = ["03aa", "ffaa", "x", "0", "zz12", "0Aaa", "02aa"]
    for request_id in ("00a", "01a", *strange, "01b", "00b"):
        scheduler.notices.receive(ready(request_id, rank=1, world=2))
    await settled()
    assert (scheduler.taken, first.ids, second.ids) == (strange, ["00a", "00b"], ["01a", "01b"])
    assert second.taken[1] == ready("01b", rank=1, world=2)
    assert (first.messages, second.messages) == (1, 1), "those of one turn are one message"
    assert not scheduler.counted


def test_an_id_names_its_worker() -> None:
    assert worker_of("1f" + "0" * 30) == 31
    assert worker_of("cmpl-x") is None
    assert worker_of("") is None


@pytest.mark.parametrize("is_read", [False, True])
async def test_long_fields_go_along_only_where_they_are_read(is_read: bool) -> None:
    scheduler, worker = Scheduler(is_read=is_read), Worker(1)
    worker.connect(scheduler)
    whole = ready("01a", params=b"{}", token_ids=b"[1]", tokens=1)
    scheduler.notices.receive(whole)
    await settled()
    assert worker.taken == [whole if is_read else ready("01a", tokens=1)]
    scheduler.links.stop()
    worker.link.close()


async def test_a_defect_in_one_notice_does_not_lose_the_others(all_of_them: Made) -> None:
    scheduler, (_, worker) = all_of_them
    scheduler.receive("01a", "01bad", "01b")
    await settled()
    assert worker.ids == ["01a", "01b"]
    assert [str(one) for one in worker.failures] == ["01bad"]


async def test_notices_wait_for_a_worker_that_is_not_connected() -> None:
    """A scheduler process that has just begun reads notices before workers have its links; and a
    worker may end.
    """
    scheduler, worker = Scheduler(), Worker(1)
    scheduler.receive("01a", "00a")
    await settled()
    worker.connect(scheduler)
    await settled()
    assert worker.ids == ["01a"]
    worker.link.close()
    await settled()
    scheduler.receive("01b")
    await settled()
    worker = Worker(1)
    worker.connect(scheduler)
    await settled()
    assert worker.ids == ["01b"]
    scheduler.links.stop()
    worker.link.close()


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_flood_for_a_worker_that_reads_nothing_fills_no_memory(is_connected: bool) -> None:
    """Notices are dropped, and counted; once it reads they are passed on again."""
    scheduler, worker = Scheduler(is_read=True), SimpleNamespace(said=[], unsent=0)

    def tell(_: object, pool: int, notices: Sequence[Notice]) -> None:
        body = msgspec.msgpack.encode(notices)
        worker.said.append(body)
        worker.unsent += len(body)

    worker.tell = tell
    if is_connected:
        scheduler.notices.joined(1, worker)  # type: ignore[arg-type]
    megabyte = b"[" + b"1," * (AT_ONCE // 2 - 8) + b"1]"
    for _ in range(1000):
        for _ in range(3):
            scheduler.notices.receive(ready("01" + "a" * 500, token_ids=megabyte))
        await asyncio.sleep(0)
    if not is_connected:
        scheduler.notices.joined(1, worker)  # type: ignore[arg-type]
    assert MAX_UNREAD < worker.unsent < MAX_UNREAD + 2 * AT_ONCE
    assert scheduler.counted["ready", "not_passed"] > 2900
    assert " 0 bytes" in repr(scheduler.notices)
    worker.unsent, before = 0, len(worker.said)
    scheduler.receive("01b")
    await settled()
    assert len(worker.said) == before + 1


async def test_what_a_worker_has_not_read_is_counted(all_of_them: Made) -> None:
    scheduler, (worker, _) = all_of_them
    assert worker.link._link is not None
    worker.link._link.pause()
    client = scheduler.notices._clients[0]
    client.send(bytes(4 * AT_ONCE))
    await settled()
    assert AT_ONCE < client.unsent < 5 * AT_ONCE


async def test_waits_get_their_notices() -> None:
    """One comes before the wait begins, one after, and one never: that wait ends at its
    deadline.
    """
    clock, counted = ManualClock(), Counter[str]()

    class Counts:
        def notify(self, event: Event) -> None:
            if isinstance(event, KvNoticed):
                counted[event.result] += 1

    waits = ReadyWaits(clock, Observers([Counts()]), clock.now)
    scheduler, link = Scheduler(), SchedulerLink()
    NoticesOfWorker(link, 0, 1, waits.receive, pytest.fail)  # type: ignore[arg-type]
    mine, its = links.pair()
    scheduler.links.connect(its)
    link.connect(mine)
    scheduler.receive("01early")
    await settled()
    early = waits.expect("01early", 1)
    assert await waits.wait(early, 10, "http://p")
    two = waits.expect("01two", 2)
    waiting = asyncio.create_task(waits.wait(two, 10, "http://p"))
    for rank in range(2):
        scheduler.notices.receive(ready("01two", rank=rank))
    assert await waiting
    never = waits.expect("01never", 1)
    late = asyncio.create_task(waits.wait(never, 10, "http://p"))
    await settled()
    await clock.advance(10.1)
    assert not await late
    never.close()
    scheduler.receive("01never")
    await settled()
    assert counted == {"early": 1, "awaited": 2, "late": 1}
    assert waits.kept == 0
    scheduler.links.stop()
    link.close()


async def test_posts_that_name_prompts_of_several_workers(all_of_them: Made) -> None:
    """LMCache posts all requests of a step at once."""
    scheduler, (first, second) = all_of_them
    names = b'["cmpl-00a-0-0123abcd","chatcmpl-01b-0123abcd"]'
    body = (
        b'{"event":"request_store_finished","request_ids_set":%b,"kv_rank":0,"world_size":1}'
        % names
    )
    for notice in notices(body) or []:
        scheduler.notices.receive(notice)
    await settled()
    assert (first.ids, second.ids) == (["00a"], ["01b"])


# -- the socket

PLACE = AddressToBind("kv_ready", "127.0.0.1", 0)


def _notices(taken: list[str]) -> NoticeSocket:
    return NoticeSocket(lambda notice: taken.append(notice.request_id), lambda: None, pytest.fail)  # type: ignore[arg-type]


async def test_senders_come_to_the_next_scheduler_process() -> None:
    """At the same address, which nobody binds anew; connections wait while there is none."""
    listener = listener_at(PLACE)
    port = listener.getsockname()[1]
    sockets = KeptSockets({"kv_ready": listener})
    taken: list[str] = []
    with zmq.Context() as context:
        senders = [context.socket(zmq.PUSH) for _ in range(8)]
        for sender in senders:
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(f"tcp://127.0.0.1:{port}")
        for number in range(2):
            for sender in senders:
                sender.send(b"\x81\xa6req_id\xa1%d" % number)
            await asyncio.sleep(0.05)
            one = _notices(taken)
            sockets.bind(one, PLACE)
            assert one.address == f"tcp://127.0.0.1:{port}"
            await until(lambda number=number: taken.count(str(number)) == 8)  # type: ignore[misc]
            with pytest.raises(SettingsError, match="Address already in use"):
                listener_at(AddressToBind("kv_ready", "127.0.0.1", port))
            one.close()
            await asyncio.sleep(0.05)  # what is sent while a sender does not know it yet is lost
        for sender in senders:
            sender.close()
    assert listener.fileno() >= 0
    listener.close()


async def test_a_socket_of_a_connector_that_was_found_late_is_bound_late() -> None:
    sockets, taken = KeptSockets({}), list[str]()
    one = _notices(taken)
    sockets.bind(one, PLACE)
    assert one.address is not None
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(one.address)
        sender.send(b"\x81\xa6req_id\xa1a")
        await until(lambda: taken == ["a"])
    port = int(one.address.rpartition(":")[2])
    with pytest.raises(SettingsError, match=f"can't bind kv_ready.* = 127.0.0.1:{port}: Address"):
        sockets.bind(_notices([]), AddressToBind("kv_ready", "127.0.0.1", port))
    one.close()


def test_an_address_of_another_machine_is_a_mistake() -> None:
    with pytest.raises(
        SettingsError, match=r"can't bind kv_ready.host:kv_ready.port = 192.0.2.1:7"
    ):
        listener_at(AddressToBind("kv_ready", "192.0.2.1", 7))


async def test_ipv6() -> None:
    listener = listener_at(AddressToBind("kv_ready", "::1", 0))
    one = _notices([])
    KeptSockets({"kv_ready": listener}).bind(one, AddressToBind("kv_ready", "::1", 0))
    assert one.address == f"tcp://[::1]:{listener.getsockname()[1]}"
    one.close()
    listener.close()
