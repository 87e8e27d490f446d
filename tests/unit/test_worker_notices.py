"""Notices that come to any worker are taken once, by the one whose prompt they are about; bounded,
whoever sends them.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import zmq

from pdproxy.app.sockets import AddressToBind, BoundBefore, listener_at
from pdproxy.app.worker_notices import AT_ONCE, WorkerNotices
from pdproxy.kit.ids import worker_of
from pdproxy.kit.leading import NEVER
from pdproxy.kit.siblings import ALL
from pdproxy.observe.events import Event, KvNoticed, Observers
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.settings.errors import SettingsError
from pdproxy.upstream.notices import NoticeSocket
from pdproxy.wire.lmcache_telemetry import notices
from pdproxy.wire.notices import Notice, NoticeEvent
from pdproxy.workers.followed_members import FollowedMembers
from pdproxy.workers.pool_share import PoolMemory, WorkerPoolShare
from pdproxy.workers.records import SharedRecords
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.switchboard import MAX_BEHIND
from tests.fakes.clock import ManualClock
from tests.fakes.world import until
from tests.sim.raw import turns
from tests.unit.test_siblings import Parent


class Workers:
    """Workers that take notices, with what each has taken and counted."""

    def __init__(self, count: int = 3, *, is_read: bool = False, topic: str = "notices") -> None:
        self.parent = Parent(count)
        self.taken: list[list[Notice]] = [[] for _ in range(count)]
        self.failures: list[Exception] = []
        self.counted: Counter[tuple[str, str]] = Counter()
        self.sent = 0
        self.all = [self._made(number, count, topic, is_read) for number in range(count)]

    def _made(self, number: int, count: int, topic: str, is_read: bool) -> WorkerNotices:
        def take(notice: Notice) -> None:
            if notice.request_id.endswith("bad"):
                raise ValueError(notice.request_id)
            self.taken[number].append(notice)

        siblings = self.parent.all[number]
        return WorkerNotices(
            number,
            count,
            topic,
            siblings,
            take,
            Observers([self]),
            self.failures.append,
            is_read=is_read,
        )

    def notify(self, event: Event) -> None:
        if isinstance(event, KvNoticed):
            self.counted[event.event, event.result] += 1

    def ids(self) -> list[list[str]]:
        return [[one.request_id for one in taken] for taken in self.taken]


def ready(request_id: str, **more: object) -> Notice:
    return Notice(event=NoticeEvent.READY, request_id=request_id, **more)  # type: ignore[arg-type]


async def test_each_goes_to_the_worker_whose_id_it_has() -> None:
    """In the order in which they came. What names no worker that there is stays where it is."""
    workers = Workers()
    strange = ["03aa", "ffaa", "x", "0", "zz12", "0Aaa"]
    for request_id in ("00a", "01a", "02a", *strange, "02b", "00b"):
        workers.all[0].receive(ready(request_id, rank=1, world=2))
    assert workers.ids() == [["00a", *strange, "00b"], [], []]
    await turns(3)
    assert workers.ids()[1:] == [["01a"], ["02a", "02b"]]
    assert workers.taken[2][0] == ready("02a", rank=1, world=2)
    assert not workers.counted


def test_an_id_names_its_worker() -> None:
    assert worker_of("1f" + "0" * 30) == 31
    assert worker_of("cmpl-x") is None
    assert worker_of("") is None


async def test_those_of_one_turn_are_one_message() -> None:
    workers = Workers(2)
    sent = 0

    def count(number: int, message: object) -> None:
        nonlocal sent
        sent += 1
        workers.parent.switchboard.received(workers.parent.workers[number], message)  # type: ignore[arg-type]

    workers.parent.sent = count  # type: ignore[method-assign]
    for number in range(100):
        workers.all[0].receive(ready(f"01{number}"))
    await turns(3)
    assert (sent, len(workers.taken[1])) == (1, 100)


@pytest.mark.parametrize("is_read", [False, True])
async def test_long_fields_go_along_only_where_they_are_read(is_read: bool) -> None:
    workers = Workers(2, is_read=is_read)
    whole = ready("01a", params=b"{}", token_ids=b"[1]", tokens=1)
    workers.all[0].receive(whole)
    await turns(3)
    assert workers.taken[1] == [whole if is_read else ready("01a", tokens=1)]


async def test_a_defect_in_one_notice_does_not_lose_the_others() -> None:
    workers = Workers(2)
    for request_id in ("01a", "01bad", "01b"):
        workers.all[0].receive(ready(request_id))
    await turns(3)
    assert workers.ids()[1] == ["01a", "01b"]
    assert [str(one) for one in workers.failures] == ["01bad"]


async def test_notices_for_a_worker_that_has_ended_are_dropped() -> None:
    """Its successor is another process: it gets those that come when it is there."""
    workers = Workers(2)
    workers.parent.workers[1].pid = None
    workers.all[0].receive(ready("01a"))
    await turns(3)
    workers.parent.workers[1].pid = 7
    workers.all[0].receive(ready("01b"))
    await turns(3)
    assert workers.ids()[1] == ["01b"]


async def test_a_flood_for_another_worker_fills_no_memory() -> None:
    """As long as the parent does not read, notices are dropped, and counted; afterwards they are
    passed on again.
    """
    workers = Workers(2, is_read=True)
    siblings = workers.parent.all[0]
    unsent = 0

    def kept(message: object) -> None:
        nonlocal unsent
        unsent += len(message.body)  # type: ignore[attr-defined]

    siblings._send, siblings.is_behind = kept, lambda: unsent > MAX_BEHIND
    megabyte = b"[" + b"1," * (AT_ONCE // 2 - 8) + b"1]"
    for _ in range(1000):
        for _ in range(3):
            workers.all[0].receive(ready("01" + "a" * 500, token_ids=megabyte))
        await asyncio.sleep(0)
    assert unsent < MAX_BEHIND + 2 * AT_ONCE
    assert workers.counted["ready", "not_passed"] > 2900
    assert "0 bytes" in repr(workers.all[0])
    siblings.is_behind = lambda: False
    before = unsent
    workers.all[0].receive(ready("01b"))
    await turns(2)
    assert unsent > before


async def test_a_worker_that_reads_nothing_is_passed_nothing_more() -> None:
    """The parent drops it: it keeps no more for it than for what is told."""

    class Full:
        unsent = MAX_BEHIND

    workers = Workers(2)
    workers.parent.workers[1].link = Full()  # type: ignore[assignment]
    workers.all[0].receive(ready("01a"))
    await turns(3)
    assert workers.ids()[1] == []


async def test_what_is_passed_to_all_comes_to_all_in_one_order() -> None:
    """To the one that has sent it, too."""
    parent, heard = Parent(3), [[], [], []]  # type: ignore[var-annotated]
    for number, one in enumerate(parent.all):
        one.hears["x"] = heard[number].append
    for at in (2, 0, 1, 2):
        assert parent.all[at].pass_on(ALL, "x", b"%d" % at)
        assert parent.all[at].pass_on(1, "y", b"not heard")
    await turns(3)
    assert heard == [[b"2", b"0", b"1", b"2"]] * 3


async def test_waits_get_their_notices_wherever_these_came() -> None:
    """One comes before the wait begins, one after, and one never: that wait ends at its
    deadline.
    """
    parent, clock = Parent(2), ManualClock()
    counted: Counter[str] = Counter()

    class Counts:
        def notify(self, event: Event) -> None:
            if isinstance(event, KvNoticed):
                counted[event.result] += 1

    observers = Observers([Counts()])
    waits = [ReadyWaits(clock, observers, clock.now) for _ in range(2)]
    reads = [
        WorkerNotices(
            at,
            2,
            "n",
            parent.all[at],
            waits[at].receive,
            observers,
            pytest.fail,  # type: ignore[arg-type]
            is_read=False,
        )
        for at in range(2)
    ]
    reads[0].receive(ready("01early"))
    await turns(3)
    early = waits[1].expect("01early", 1)
    assert await waits[1].wait(early, 10, "http://p")
    two = waits[1].expect("01two", 2)
    waiting = asyncio.create_task(waits[1].wait(two, 10, "http://p"))
    reads[0].receive(ready("01two", rank=0))
    reads[1].receive(ready("01two", rank=1))
    assert await waiting
    never = waits[1].expect("01never", 1)
    late = asyncio.create_task(waits[1].wait(never, 10, "http://p"))
    await turns(3)
    await clock.advance(10.1)
    assert not await late
    never.close()
    reads[0].receive(ready("01never"))
    await turns(3)
    assert counted == {"early": 1, "awaited": 2, "late": 1}
    assert [one.kept for one in waits] == [0, 0]


async def test_posts_that_name_prompts_of_several_workers() -> None:
    """LMCache posts all requests of a step at once, to any worker."""
    workers = Workers(2, topic="posted")
    names = b'["cmpl-00a-0-0123abcd","chatcmpl-01b-0123abcd"]'
    body = (
        b'{"event":"request_store_finished","request_ids_set":%b,"kv_rank":0,"world_size":1}'
        % names
    )
    for notice in notices(body) or []:
        workers.all[1].receive(notice)
    await turns(3)
    assert workers.ids() == [["00a"], ["01b"]]


# -- the socket


def _notices(taken: list[str], failures: list[Exception]) -> NoticeSocket:
    return NoticeSocket(
        lambda notice: taken.append(notice.request_id), lambda: None, failures.append
    )


async def test_workers_take_connections_from_one_socket() -> None:
    """When one of them closes its own, its senders come to the other, at the same address; nobody
    binds anything anew.
    """
    listener = listener_at(AddressToBind("kv_ready", "127.0.0.1", 0))
    port = listener.getsockname()[1]
    taken: list[list[str]] = [[], []]
    failures: list[Exception] = []
    ends = [_notices(one, failures) for one in taken]
    for one in ends:
        BoundBefore({"kv_ready": listener}).bind(one, AddressToBind("kv_ready", "127.0.0.1", 0))
        assert one.address == f"tcp://127.0.0.1:{port}"
    with zmq.Context() as context:
        senders = [context.socket(zmq.PUSH) for _ in range(8)]
        for number, sender in enumerate(senders):
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(f"tcp://127.0.0.1:{port}")
            sender.send(b"\x81\xa6req_id\xa2a%d" % number)
        await until(lambda: sum(map(len, taken)) == 8)
        ends[0].close()
        before = len(taken[1])
        for _ in range(500):  # what is sent while a sender does not know it yet is lost
            for number, sender in enumerate(senders):
                sender.send(b"\x81\xa6req_id\xa2b%d" % number)
            await asyncio.sleep(0.02)
            if len({one for one in taken[1][before:] if one[0] == "b"}) == 8:
                break
        assert {f"b{number}" for number in range(8)} <= set(taken[1])
        with pytest.raises(SettingsError, match="Address already in use"):
            listener_at(AddressToBind("kv_ready", "127.0.0.1", port))
        ends[1].close()
        for sender in senders:
            sender.close()
    assert listener.fileno() >= 0
    listener.close()
    assert not failures


async def test_connections_wait_while_no_worker_is_there() -> None:
    listener = listener_at(AddressToBind("kv_ready", "127.0.0.1", 0))
    taken: list[str] = []
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        sender.send(b"\x81\xa6req_id\xa1a")
        await asyncio.sleep(0.05)
        late = _notices(taken, [])
        BoundBefore({"kv_ready": listener}).bind(late, AddressToBind("kv_ready", "127.0.0.1", 0))
        await until(lambda: taken == ["a"])
        late.close()
    listener.close()


async def test_a_connector_that_is_found_too_late_is_to_be_named() -> None:
    """What it needs had to be bound before the workers began."""
    links = SchedulerLinks(chooses=False, workers=1)
    share = WorkerPoolShare(
        PoolMemory(2),
        0,
        0,
        SharedRecords(2, 8).area(0),
        NEVER,
        lambda: 0.0,
        Parent(2).all[0],
        links,
        1,
        FollowedMembers(links.link),
    )
    with pytest.raises(
        SettingsError,
        match=r"connector: auto: with several workers, name a connector .*\(registration\)",
    ):
        share.sockets.bind(_notices([], []), AddressToBind("registration", "127.0.0.1", 0))


def test_an_address_of_another_machine_is_a_mistake() -> None:
    with pytest.raises(
        SettingsError, match=r"can't bind kv_ready.host:kv_ready.port = 192.0.2.1:7"
    ):
        listener_at(AddressToBind("kv_ready", "192.0.2.1", 7))


async def test_ipv6() -> None:
    listener = listener_at(AddressToBind("kv_ready", "::1", 0))
    one = _notices([], [])
    BoundBefore({"kv_ready": listener}).bind(one, AddressToBind("kv_ready", "::1", 0))
    assert one.address == f"tcp://[::1]:{listener.getsockname()[1]}"
    one.close()
    listener.close()
