"""Choosing engines by message: as by a call, whatever ends on either side, and whenever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.transfers import Transfers
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import (
    BadRequestError,
    EnginesLostError,
    OverloadedError,
    RefusalReason,
    TooLateError,
)
from pdproxy.observe.description import Description, Samples
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.scheduling.leases import Assignment, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.outliers import Outliers
from pdproxy.scheduling.placement import Candidates, NotYetError, Placed, Placement
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.scheduler import ANY, Constraints, Scheduler
from pdproxy.scheduling.transfer_faults import KnownTransfers
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.limits import Deadlines
from pdproxy.workers import item_link, links, scheduler_clients, scheduler_link
from pdproxy.workers.calls import Answer, asked, error_of, refused, told
from pdproxy.workers.publisher import Publisher
from pdproxy.workers.remote_scheduler import TRANSFERS, HeldLease, RemoteScheduler
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.worker_choices import ChoicesOfWorker, PoolChoices, serve_choices
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client
from tests.fakes.world import until

P, D, D2, E = "http://p:1", "http://d:1", "http://d:2", "http://e:1"
ROLES = {P: Role.PREFILL, D: Role.DECODE, D2: Role.DECODE, E: Role.ENCODE}
ASK = Ask("m", 100, 1.0, 25)


def fleet(*, chunks: int | None = None) -> tuple[EngineRegistry, Ledger]:
    """Engines that are up. `chunks`: of KV that each decode engine's receive buffer takes."""
    engines, ledger = registry()
    for url, role in ROLES.items():
        capacity = chunks if role is Role.DECODE else None
        engines.add(EngineSpec(url, role), unused_client(url), buffer_capacity=capacity)
        ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
    return engines, ledger


class Shown(Observers):
    """Observers that keep what gauges read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__([recorder])
        self.gauges: dict[str, Callable[[], Samples]] = {}

    def show(self, metric: Description, read: Callable[[], Samples]) -> None:
        """Keep it."""
        self.gauges[metric.name] = read


class Deciding:
    """A scheduler process, with its own fleet. `restarted`: its workers are welcome later."""

    def __init__(self, *, chunks: int | None = None, restarted: bool = False) -> None:
        self.engines, self.ledger = fleet(chunks=chunks)
        self.recorder = Recorder()
        self.shown = observers = Shown(self.recorder)
        clock = Clock()
        self.buffers = ReceiveBuffers(self.engines, 16, clock, observers, Deadlines())
        self.outliers = Outliers(OutlierSettings())
        self.scheduler = LocalScheduler(
            self.ledger,
            self.outliers,
            self.buffers,
            Transfers(self.ledger, observers, clock.now),
            observers,
            clock.now,
            None,
            None,
        )
        self._restarted = restarted
        self.clients: list[SchedulerClient] = []
        self.lost: list[SchedulerClient] = []
        self.publisher = Publisher()
        transfers = self.ledger.transfers
        topic = self.publisher.topic(f"{TRANSFERS} 0", lambda _: transfers.known())
        transfers.changed = topic.changed

    def connect(self, link: SchedulerLink) -> SchedulerClient:
        """Connect a worker."""
        mine, its = links.pair()
        pool = PoolChoices(self.scheduler, self.ledger, self.buffers, lambda: None, lambda: 2.0)
        client = SchedulerClient(mine, self.lost.append, self._said)
        self.leases = serve_choices(client, [pool])
        self.clients.append(client)
        link.connect(its)
        return client

    def _said(self, client: SchedulerClient) -> None:
        self.publisher.greet(client)
        if not self._restarted:
            client.welcome()

    def loads(self) -> dict[str, int]:
        """The open leases of each engine that has any."""
        return {one.url: one.requests for one in self.ledger.engines if one.requests}

    def spaces(self) -> int:
        """The chunks that are taken."""
        return sum(self.buffers.taken.values())


class Questions:
    """What a worker asks."""

    def __init__(self, answer: Callable[[int, bytes], Coroutine[Any, Any, bytes]]) -> None:
        self._answer = answer

    @asked
    def answer(self, number: int, body: bytes) -> Answer[bytes]:
        """Return an answer, sooner or later."""
        return self._answer(number, body)


class Notes:
    """What one side is told."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    @told
    def note(self, text: str) -> None:
        """Take a note."""
        if text == "wrong":
            raise ValueError(text)
        self._take(text)


class Silent:
    """Answers nothing."""

    async def choose(self, *_: object) -> None:
        await asyncio.Event().wait()

    choose_one = choose_encoders = failed = refused_more = restore = choose


class Worker:
    """A worker with its own view of the same fleet."""

    def __init__(self) -> None:
        self.engines, self.ledger = fleet()
        self.link = SchedulerLink()
        self.scheduler = RemoteScheduler(
            self.link,
            0,
            self.engines,
            self.ledger,
            Observers([]),
            lambda tokens: tokens < 100,
            lambda: 2.0,
        )

    async def pair(self, name: str = "id", constraints: Constraints = ANY) -> Assignment:
        """A prefill and a decode engine."""
        chosen = await self.scheduler.choose(name, ASK, constraints)
        assert chosen is not None
        return chosen


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def both():
    s, w = Deciding(), Worker()
    s.connect(w.link)
    yield s, w
    w.link.close()
    for client in s.clients:
        client.close()


def urls(leases) -> list[str]:
    return [lease.engine.url for lease in leases]


# -- as by a call


async def test_a_pair_is_leased_and_closed(both) -> None:
    s, w = both
    chosen = await w.pair()
    _, d = urls(chosen.leases)
    assert [lease.role for lease in chosen.leases] == [Role.PREFILL, Role.DECODE]
    assert chosen.leases[0].prompt_bytes == 100
    assert chosen.leases[0].engine is w.engines.known[P].in_ledger
    assert s.loads() == {P: 1, d: 1}
    for lease in chosen.leases:
        for _ in range(2):  # the second time changes nothing
            w.scheduler.close(lease, Verdict.GOOD, 3.0, pace=0.5, tokens=7)
    await settled()
    assert (s.loads(), len(s.leases), w.scheduler.leases) == ({}, 0, {})
    windows = s.outliers._windows.items()
    counted = {key.url: (one.now.good, one.now.timed) for key, one in windows}
    assert counted == {P: (1, 1), d: (1, 1)}


async def test_calls_arrive_in_order_and_a_new_process_is_told_first() -> None:
    s, w = Deciding(), Worker()
    heard: list[object] = []
    w.link.begins.append(lambda: w.link.tell(Notes.note, 0, "held"))
    w.link.serve(Notes, Notes(heard.append))
    client = s.connect(w.link)
    client.serve(Notes, Notes(lambda note: heard.append((note, client.has_said))))
    w.link.tell(Notes.note, 0, "wrong")
    w.link.tell(Notes.note, 0, "more")
    await settled()
    # what fails keeps nothing back
    assert heard == [("held", False), ("more", True)]
    heard.clear()
    client.tell(Notes.note, 0, "wrong")
    client.tell(Notes.note, 0, "told")
    await settled()
    assert heard == ["told"]
    heard.clear()
    client.close()
    await settled()
    client = s.connect(w.link)
    client.serve(Notes, Notes(heard.append))
    await settled()
    assert heard == ["held"]
    w.link.close()
    client.close()


async def test_questions_are_answered_whenever_that_can_be() -> None:
    """Behind one another, or not at all: an error is the asker's, and who leaves is not answered.
    A question that waits as the scheduler process ends is asked of the next one.
    """
    s, w = Deciding(), Worker()
    go_on, waiting = asyncio.Event(), 0

    async def answer(number: int, body: bytes) -> bytes:
        nonlocal waiting
        if body == b"full":
            raise OverloadedError("full", RefusalReason.QUEUE_FULL, retry_after=3.0)
        if body == b"wrong":
            raise ValueError(body)
        waiting += 1
        try:
            await go_on.wait()
        finally:
            waiting -= 1
        return body + str(number).encode()

    def ask(body: bytes) -> asyncio.Task[bytes]:
        return asyncio.ensure_future(w.link.ask(w.link.question(), Questions.answer, 3, body))

    client = s.connect(w.link)
    client.serve(Questions, Questions(answer), 3)
    first, left, full, wrong = [ask(body) for body in (b"x", b"y", b"full", b"wrong")]
    await settled()
    assert (first.done(), waiting) == (False, 2)
    with pytest.raises(OverloadedError) as error:
        full.result()
    assert (error.value.reason, error.value.retry_after) == (RefusalReason.QUEUE_FULL, 3.0)
    assert isinstance(wrong.exception(), OverloadedError)
    left.cancel()
    await settled()
    assert waiting == 1
    client.close()
    await settled()
    assert waiting == 0
    s.connect(w.link).serve(Questions, Questions(answer), 3)
    await settled()
    assert (first.done(), waiting) == (False, 1)
    go_on.set()
    await settled()
    assert first.result() == b"x0"
    w.link.close()
    s.clients[-1].close()


@pytest.mark.parametrize("turns", range(8))
async def test_who_leaves_a_question_at_any_moment_leaves_nothing(turns: int) -> None:
    """Also before its answer has begun, which then is never awaited."""
    s, w = Deciding(), Worker()
    waiting = 0

    async def answer(number: int, body: bytes) -> bytes:
        nonlocal waiting
        waiting += 1
        try:
            await asyncio.sleep(3600)
        finally:
            waiting -= 1
        return body

    client = s.connect(w.link)
    client.serve(Questions, Questions(answer), 3)
    await settled()
    asking = asyncio.ensure_future(w.link.ask(w.link.question(), Questions.answer, 3, b"x"))
    Steps(asking.cancel).behind(turns)
    await settled()
    assert (asking.cancelled(), waiting, client._waiting) == (True, 0, {})
    w.link.close()
    client.close()


async def test_a_socket_that_comes_before_a_process_is_made_waits() -> None:
    """What is made later hears what is said first, and holds what is said first."""
    heard: list[str] = []
    all_links = [SchedulerLinks(chooses=chooses, workers=1) for chooses in (True, False)]
    for one, end in zip(all_links, links.pair(), strict=True):
        one.connect(end)
    scheduler, worker = all_links
    scheduler.serve(Notes, Notes(heard.append), 0)
    scheduler.start()
    for client in scheduler.clients:
        client.tell(Notes.note, 0, "told")
    await settled()
    worker.link.begins.append(lambda: worker.link.tell(Notes.note, 0, "held"))
    worker.link.serve(Notes, Notes(heard.append))
    worker.start()
    await settled()
    assert heard == ["told", "held"]
    for one in all_links:
        one.stop()


async def test_what_constrains_a_choice_counts(both) -> None:
    s, w = both
    chosen = await w.pair("id", Constraints(without=(D,)))
    assert urls(chosen.leases) == [P, D2]
    whole = await w.pair("id", Constraints("short_prompt", avoid=(D2,)))
    assert urls(whole.leases) == [D]
    assert await w.scheduler.choose("id", ASK, Constraints(without=(P,))) is None
    one = await w.scheduler.choose_one(ASK, without=(D,))
    assert one is not None
    assert one.engine.url == D2
    media = await w.scheduler.choose_encoders([ASK, ASK], (), proven=False)
    assert urls(media) == [E, E]
    assert await w.scheduler.choose_encoders([ASK], (E,), proven=False) == []
    assert s.loads() == {P: 1, D: 1, D2: 2, E: 2}
    assert len(s.leases) == len(w.scheduler.leases) == 6


async def test_what_legs_show_is_told(both) -> None:
    """Failures open the breaker; what is told behind the end of a lease counts, too."""
    s, w = both
    for _ in range(2):
        lease = await w.scheduler.choose_one(ASK, without=(D2,))
        assert lease is not None
        w.scheduler.close(lease, Verdict.FAILED, 3.0)
    w.scheduler.failed(lease, 3.0)
    w.scheduler.lost_model(D2, "m")
    w.scheduler.found_gone(P, "it is gone", 3.0)
    w.scheduler.kv_took(P, D2, 3.0, 0.5)
    await settled()
    down = [(one.node, one.state) for one in s.recorder.of(NodeChanged) if not one.up]
    assert down == [(D, "excluded"), (P, "down")]
    assert not s.ledger.get(D2).serves("m")
    assert [key.partner for key in s.outliers._windows if key.url == D2] == [P]
    s.engines.remove(P)  # what is told of an engine that is gone is not kept for ever
    w.scheduler.kv_took(P, D, 3.0, 0.5)
    await settled()
    assert [key.partner for key in s.outliers._windows if key.url == D] == [""]


async def test_an_engine_that_the_worker_does_not_know_yet_gets_nothing(both) -> None:
    """Another one is chosen, if there is any."""
    s, w = both
    w.engines.known.pop(D)
    for _ in range(4):
        chosen = await w.pair()
        assert urls(chosen.leases) == [P, D2]
        for lease in chosen.leases:
            w.scheduler.close(lease, Verdict.GOOD, 3.0)
    w.engines.known.pop(D2)
    assert await w.scheduler.choose("id", ASK) is None
    assert await w.scheduler.choose_one(ASK) is None
    await settled()
    assert (s.loads(), w.scheduler.leases) == ({}, {})


@pytest.mark.parametrize(
    "error",
    [
        TooLateError("late"),
        EnginesLostError("lost", retry_after=4.0),
        OverloadedError("full", RefusalReason.CAPACITY, retry_after=2),
    ],
)
def test_a_refusal_arrives_as_it_is(error: OverloadedError) -> None:
    got = error_of(refused(1, error))
    assert (type(got), got.message, got.reason, got.retry_after) == (
        type(error),
        error.message,
        error.reason,
        error.retry_after,
    )


async def test_space_is_waited_for_and_released() -> None:
    s, w = Deciding(chunks=2), Worker()
    s.connect(w.link)
    ask = Constraints(without=(D2,), kv_tokens=32)
    first = await w.pair("a", ask)
    assert first.space is not None
    waits = asyncio.create_task(w.pair("b", ask))
    gone = asyncio.create_task(w.pair("c", ask))
    await settled()
    assert not waits.done()
    gone.cancel()
    for _ in range(2):  # the second time changes nothing
        first.space.release()
    assert urls((await waits).leases) == [P, D]
    await settled()
    assert (s.spaces(), s.loads()) == (2, {P: 2, D: 2})
    w.scheduler.close(waits.result().leases[1], Verdict.GOOD, 3.0)  # its space is still taken
    w.link.close()
    await settled()
    assert (s.spaces(), s.loads(), len(s.lost)) == (0, {}, 1)


# -- whatever ends, and whenever


class Steps:
    """Ends something behind so many turns of the event loop."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def behind(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.behind, turns - 1)
        else:
            self._end()


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("turns", range(12))
async def test_who_leaves_at_any_moment_leaves_nothing(turns: int, chunks: int | None) -> None:
    """Before the question is sent, before it is read, before its answer is read, behind it."""
    s, w = Deciding(chunks=chunks), Worker()
    client = s.connect(w.link)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: w.scheduler.choose("id", ASK, Constraints(kv_tokens=16)),
        lambda: w.scheduler.choose_one(ASK),
        lambda: w.scheduler.choose_encoders([ASK, ASK, ASK], (), proven=True),
    ]
    for call in calls:
        asking = asyncio.ensure_future(call())
        Steps(asking.cancel).behind(turns)
        await asyncio.wait([asking])
        if not asking.cancelled():
            found = asking.result()
            if isinstance(found, Assignment) and found.space is not None:
                found.space.release()
            for lease in found if isinstance(found, list) else getattr(found, "leases", [found]):
                w.scheduler.close(lease, Verdict.NEUTRAL, 2.0)
        await settled()
        assert (s.loads(), s.spaces()) == ({}, 0)
        assert (len(s.leases), w.scheduler.leases, w.link._open) == (0, {}, {})
    w.link.close()
    client.close()


@pytest.mark.parametrize("turns", range(12))
async def test_a_worker_that_ends_at_any_moment_leaves_nothing(turns: int) -> None:
    s, w = Deciding(), Worker()
    s.connect(w.link)
    asking = [asyncio.ensure_future(w.scheduler.choose("id", ASK)) for _ in range(3)]
    Steps(w.link._drop_link).behind(turns)
    await settled()
    assert (s.loads(), s.lost) == ({}, s.clients)
    for one in asking:
        one.cancel()
    w.link.close()


@pytest.mark.parametrize("turns", range(12))
async def test_a_scheduler_that_ends_at_any_moment_loses_no_request(turns: int) -> None:
    """The next one is told what the worker has, and is asked what was not answered."""
    s, w = Deciding(), Worker()
    client = s.connect(w.link)
    held = await w.pair("held")
    asking = [asyncio.ensure_future(w.pair(f"{n}")) for n in range(3)]
    Steps(client.close).behind(turns)
    await settled()
    w.scheduler.close(held.leases[0], Verdict.GOOD, 3.0)
    after = Deciding(restarted=True)
    after.connect(w.link)
    await settled()
    assert after.clients[0].has_said
    assert after.loads() != {}
    assert not any(one.done() and one.exception() for one in asking)
    after.clients[0].welcome()
    found = await asyncio.gather(*asking)
    assert all(urls(one.leases)[0] == P for one in found)
    assert sum(after.loads().values()) == 1 + 2 * 3
    assert len(after.leases) == len(w.scheduler.leases) == 7
    for one in [held, *found]:
        for lease in one.leases:
            w.scheduler.close(lease, Verdict.GOOD, 4.0)
    await settled()
    assert (after.loads(), len(after.leases), w.scheduler.leases) == ({}, 0, {})
    w.link.close()


async def test_space_is_known_to_the_next_scheduler() -> None:
    s, w = Deciding(chunks=2), Worker()
    client = s.connect(w.link)
    held = await w.pair("a", Constraints(without=(D2,), kv_tokens=32))
    assert held.space is not None
    client.close()
    after = Deciding(chunks=2)
    await settled()
    after.connect(w.link)
    await settled()
    assert after.spaces() == 2
    held.space.release()
    await settled()
    assert after.spaces() == 0
    w.link.close()


async def test_a_question_that_ends_schedulers_ends_two_at_most() -> None:
    w = Worker()
    asking = asyncio.ensure_future(w.scheduler.choose("id", ASK))
    for _ in range(scheduler_link.TRIES):
        s = Deciding()
        client = s.connect(w.link)
        client.serve(ChoicesOfWorker, Silent())
        await settled()
        assert not asking.done()
        client.close()
        await settled()
    s.connect(w.link)
    with pytest.raises(OverloadedError, match="could not be chosen"):
        await asking
    w.link.close()


async def test_nobody_waits_long_for_a_scheduler(monkeypatch) -> None:
    """Behind that time each question is refused at once, until there is one."""
    monkeypatch.setattr(scheduler_link, "PATIENCE", 0.0)
    s, w = Deciding(), Worker()
    client = s.connect(w.link)
    client.serve(ChoicesOfWorker, Silent())
    asking = asyncio.ensure_future(w.scheduler.choose("id", ASK))
    await settled()
    client.close()
    with pytest.raises(OverloadedError, match="no scheduler process"):
        await asyncio.wait_for(asking, 20)
    with pytest.raises(OverloadedError, match="does not answer"):
        await w.scheduler.choose("id", ASK)
    Deciding().connect(w.link)
    await settled()
    assert urls((await w.pair()).leases)[0] == P
    w.link.close()


async def test_one_that_ends_before_it_chooses_was_ended_by_no_question(monkeypatch) -> None:
    """However often. One that does not begin to choose is waited for no longer than one that does
    not come.
    """
    w = Worker()
    asking = asyncio.ensure_future(w.scheduler.choose("id", ASK))
    for _ in range(scheduler_link.TRIES + 1):
        client = Deciding(restarted=True).connect(w.link)
        await settled()
        client.close()
        await settled()
    s = Deciding(restarted=True)
    client = s.connect(w.link)
    await settled()
    assert not asking.done()
    client.welcome()
    assert (await asking) is not None
    client.close()
    await settled()
    monkeypatch.setattr(scheduler_link, "PATIENCE", 0.0)
    assert w.link._patience is not None
    w.link._patience.cancel()
    w.link._patience = None
    client = Deciding(restarted=True).connect(w.link)
    with pytest.raises(OverloadedError, match="no scheduler process"):
        await w.scheduler.choose("id", ASK)
    client.welcome()
    await settled()
    assert urls((await w.pair()).leases)[0] == P
    w.link.close()


def test_the_end_of_a_worker_that_has_not_read_everything_ends_its_leases() -> None:
    """What it has sent last is read, and then its socket has an error: see `ItemLink.look`."""

    async def ends() -> None:
        s = Deciding()
        both = SchedulerLinks(chooses=True, workers=1)
        both.add(PoolChoices(s.scheduler, s.ledger, s.buffers, lambda: None, lambda: 2.0))
        heard: list[str] = []
        both.serve(Notes, Notes(heard.append), 0)
        mine, its = links.pair()
        both.connect(mine)
        both.start()
        both.choose()
        w = Worker()
        w.link.connect(its)
        await w.pair()
        assert w.link._link is not None
        w.link._link.pause()
        for client in both.clients:
            client.tell(Notes.note, 0, "not read")
        await asyncio.sleep(0)
        w.link.tell(Notes.note, 0, "last")
        w.link.close()
        await until(lambda: heard)
        both.look()
        assert (s.loads(), both.leases, len(both.clients)) == ({}, 0, 0)
        both.stop()

    uvloop.run(ends())


# -- hostile workers


async def test_a_worker_that_is_not_listened_to_is_connected_again(both, monkeypatch) -> None:
    """To the same scheduler process, which is told what the worker has."""
    monkeypatch.setattr(scheduler_link, "ALONE", 0.0)
    s, w = both
    held = await w.pair()
    loads = s.loads()
    w.link.alone = lambda: s.connect(w.link)
    assert w.link._link is not None
    w.link._link._socket.send(b"\0\0\0\4what")
    waits = asyncio.create_task(w.pair())
    await until(lambda: len(s.clients) == 2)
    for lease in (await waits).leases:
        w.scheduler.close(lease, Verdict.GOOD, 3.0)
    await settled()
    assert (s.loads(), s.lost) == (loads, s.clients[:1])
    for lease in held.leases:
        w.scheduler.close(lease, Verdict.GOOD, 3.0)
    await settled()
    assert (s.loads(), len(s.leases)) == ({}, 0)


async def test_a_worker_that_takes_too_much_is_not_listened_to(both, monkeypatch) -> None:
    s, w = both
    monkeypatch.setattr(scheduler_clients, "MAX_OPEN", 10)
    monkeypatch.setattr(scheduler_clients, "COUNTED", 10)
    with pytest.raises(OverloadedError):
        await asyncio.gather(*[w.scheduler.choose("id", ASK) for _ in range(20)], w_closed(w))
    assert (s.loads(), s.lost) == ({}, s.clients)


async def w_closed(w: Worker) -> None:
    """Refuse what waits once the link is gone: nobody gives it another one."""
    for _ in range(1000):
        if w.link._link is None:
            break
        await asyncio.sleep(0)
    w.link.close()


@pytest.mark.parametrize("body", [b"", b"\x91\xc1", b"\x91\x92\x63\x01", b"\x91\x95\x00\x01\x09"])
async def test_a_worker_that_sends_nonsense_is_not_listened_to(both, body: bytes) -> None:
    s, w = both
    await w.scheduler.choose("id", ASK)
    w.link._link._socket.send(len(body).to_bytes(4, "big") + body)
    await settled()
    assert (s.loads(), s.lost) == ({}, s.clients)


async def test_a_worker_that_does_not_read_is_not_listened_to(both) -> None:
    s, w = both
    await settled()
    s.clients[0]._link._most = 1000
    w.link._link.pause()
    asking = [
        asyncio.ensure_future(w.scheduler.choose("id", ASK, Constraints(without=(P,))))
        for _ in range(30000)
    ]
    while not s.lost:
        await asyncio.sleep(0)
    assert s.loads() == {}
    for one in asking:
        one.cancel()


async def test_many_items_of_one_worker_let_others_have_their_turn(both) -> None:
    s, w = both
    other = Worker()
    s.connect(other.link)
    many = [asyncio.ensure_future(w.scheduler.choose("id", ASK)) for _ in range(1000)]
    await asyncio.sleep(0)
    await other.scheduler.choose("id", ASK)
    assert sum(one.done() for one in many) < len(many)
    await asyncio.gather(*many)
    other.link.close()


@pytest.mark.parametrize(
    "ask", [Ask("\ud800", 1, 1.0), Ask("m" * (1 << 20), 1, 1.0), Ask("m", 1, 1.0, limit=1 << 70)]
)
async def test_a_question_that_can_not_be_sent_is_nobody_elses_trouble(both, ask: Ask) -> None:
    s, w = both
    before = asyncio.ensure_future(w.pair())
    bad = asyncio.ensure_future(w.scheduler.choose("id", ask))
    behind = asyncio.ensure_future(w.pair())
    with pytest.raises(BadRequestError):
        await bad
    for found in (await before, await behind):
        for lease in found.leases:
            w.scheduler.close(lease, Verdict.GOOD, 3.0)
    await settled()
    assert (s.loads(), w.scheduler.leases, w.link._open) == ({}, {}, {})


async def test_a_choice_that_fails_is_nobody_elses_trouble(both, monkeypatch) -> None:
    """A policy may be somebody's own."""
    s, w = both
    choose = s.scheduler.choose_now

    async def fails(request_id: str, *arguments: Any) -> Assignment | None:
        if request_id == "bad":
            raise ZeroDivisionError
        return await choose(request_id, *arguments)

    monkeypatch.setattr(s.scheduler, "choose_now", fails)
    asking = [asyncio.ensure_future(w.pair(name)) for name in ("a", "bad", "b")]
    first, bad, last = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(bad, OverloadedError)
    for found in (first, last):
        assert isinstance(found, Assignment)
        for lease in found.leases:
            w.scheduler.close(lease, Verdict.GOOD, 3.0)
    await settled()
    assert (s.loads(), s.lost, w.link._open) == ({}, [], {})


@pytest.mark.parametrize("chunks", [None, 2])
async def test_an_answer_that_can_not_be_sent_is_nobody_elses_trouble(
    monkeypatch, chunks: int | None
) -> None:
    """A placement may be somebody's own, and so its reasons."""
    s, w = Deciding(chunks=chunks), Worker()
    s.connect(w.link)
    choose = s.scheduler.choose_now

    async def fails(request_id: str, *arguments: Any) -> Assignment | None:
        found = await choose(request_id, *arguments)
        if request_id == "bad" and found is not None:
            found.reason = "\ud800"
        return found

    monkeypatch.setattr(s.scheduler, "choose_now", fails)
    asking = [
        asyncio.ensure_future(w.pair(name, Constraints(kv_tokens=16))) for name in ("a", "bad", "b")
    ]
    first, bad, last = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(bad, OverloadedError)
    for found in (first, last):
        assert isinstance(found, Assignment)
        if found.space is not None:
            found.space.release()
        for lease in found.leases:
            w.scheduler.close(lease, Verdict.GOOD, 3.0)
    await settled()
    assert (s.loads(), s.spaces(), s.lost, w.link._open) == ({}, 0, [], {})
    w.link.close()
    s.clients[0].close()


async def test_much_that_is_said_in_one_turn_comes_in_its_order(both, monkeypatch) -> None:
    monkeypatch.setattr(item_link, "AT_ONCE", 100)
    s, w = both
    for found in await asyncio.gather(*[w.pair() for _ in range(50)]):
        for lease in found.leases:
            w.scheduler.close(lease, Verdict.GOOD, 3.0)
    await settled()
    assert (s.loads(), len(s.leases), w.scheduler.leases) == ({}, 0, {})


async def test_a_busy_scheduler_process_gets_no_more_questions(both, monkeypatch) -> None:
    _, w = both
    monkeypatch.setattr(scheduler_link, "MAX_UNSENT", -1)
    with pytest.raises(OverloadedError, match="does not answer"):
        await w.scheduler.choose("id", ASK)


async def test_a_lease_is_none_of_two_requests(both) -> None:
    """Numbers are never used twice on a link."""
    _, w = both
    seen: set[int] = set()
    for _ in range(5):
        chosen = await w.pair()
        for one in chosen.leases:
            assert isinstance(one, HeldLease)
            assert one.number not in seen
            seen.add(one.number)
        w.scheduler.close(chosen.leases[0], Verdict.GOOD, 3.0)


# -- KV that does not move


async def test_whose_fault_it_is_is_found_once_and_known_to_all(both) -> None:
    """A worker tells what its legs show. Which engine is left out it reads from its view, which it
    also has after a new start.
    """
    s, w = both
    for _ in range(2):
        w.scheduler.kv_failed(P, D, 3.0)
    await settled()
    assert w.ledger.transfers.known() == s.ledger.transfers.known() != KnownTransfers()
    assert w.scheduler.left_out(P, D, []) == s.scheduler.left_out(P, D, [])
    w.scheduler.kv_failed(P, D, 3.0)
    w.scheduler.kv_loaded(P, D2, 4.0)
    await settled()
    (fault,) = s.ledger.transfers.faults.values()
    assert w.ledger.transfers.faults == {fault.key: fault}
    other = Worker()
    s.connect(other.link)
    await settled()
    assert other.ledger.transfers.faults == {fault.key: fault}
    other.link.close()
    # where a prompt tries, only the scheduler process knows: a failure counts once more
    s.ledger.transfers.try_due(fault.until)
    s.ledger.transfers.taken(P, D, fault.until)
    w.scheduler.kv_failed(P, D, fault.until + 1)
    await settled()
    assert next(iter(w.ledger.transfers.faults.values())).times == 2
    w.scheduler.kv_loaded(P, D, fault.until + 100)
    w.scheduler.kv_not_made(P, 5.0)
    await settled()
    assert not s.ledger.transfers.faults
    assert not w.ledger.transfers.faults
    assert w.ledger.transfers.suspects
    Deciding().connect(w.link)
    await settled()
    assert not w.ledger.transfers.suspects, "a new scheduler process knows of no failures"


class Patient(Placement):
    """Has requests wait as long as it is not `ready`. `asked`: by their sizes, and for how long
    they have waited. `until`: by their sizes, when they begin at the latest.
    """

    def __init__(self) -> None:
        self.ready = False
        self.until: dict[int, float] = {}
        self.asked: list[tuple[int, float]] = []

    def place(self, ask: Ask, candidates: Candidates) -> Placed:
        self.asked.append((ask.prompt_bytes, ask.waited))
        if not self.ready and ask.waited < math.inf:
            raise NotYetError(ask.now, self.until.get(ask.prompt_bytes, math.inf))
        return Placed((candidates.decode[0],), "late")


@pytest.fixture(params=["called", "by message"])
def patient(both, request):
    s, w = both
    placement = s.ledger.placement = Patient()
    s.ledger.has_placement = True
    return placement, s, w.scheduler if request.param == "by message" else s.scheduler


def waiting_late(s: Deciding) -> float:
    """What `pdproxy_waiting_late` says."""
    ((labels, count),) = s.shown.gauges["pdproxy_waiting_late"]()
    assert labels == ()
    return count


def waits(scheduler: Scheduler, size: int) -> asyncio.Task[Assignment | None]:
    return asyncio.create_task(scheduler.choose(str(size), Ask("m", size, 1.0)))


async def test_requests_that_a_placement_has_wait_are_placed_in_their_order(patient) -> None:
    """One at a time is placed again, so that many cost no more than one."""
    placement, s, scheduler = patient
    waiting = [waits(scheduler, size) for size in (1, 2, 3)]
    await settled()
    assert not any(task.done() for task in waiting)
    assert waiting_late(s) == 3
    assert placement.asked.count((2, 0.0)) == placement.asked.count((3, 0.0)) == 1
    again = [one for one in placement.asked if one[1]]
    assert len(again) > 1
    assert {size for size, _ in again} == {1}
    assert all(waited > 1.0 for _, waited in again)  # from when it came
    placement.ready = True
    found = [one for one in await asyncio.gather(*waiting) if one is not None]
    assert [size for size, _ in placement.asked[-3:]] == [1, 2, 3]
    assert [one.reason for one in found] == ["late"] * 3
    for one in found:
        scheduler.close(one.leases[0], Verdict.GOOD, 3.0)
    await settled()
    assert s.loads() == {}


@pytest.mark.parametrize(
    "constraints", [Constraints(without=(D2,)), Constraints(avoid=(D2,))], ids=["failed", "avoided"]
)
async def test_a_request_whose_engine_has_failed_does_not_wait(patient, constraints) -> None:
    """It is tried again, or goes on with a stream."""
    _, s, scheduler = patient
    chosen = await scheduler.choose("1", Ask("m", 1, 1.0), constraints)
    assert chosen.reason == "late"
    scheduler.close(chosen.leases[0], Verdict.GOOD, 3.0)
    await settled()
    assert s.loads() == {}


async def test_a_request_does_not_wait_longer_for_those_before_it_than_it_may(patient) -> None:
    """Each request may have an objective of its own."""
    placement, s, scheduler = patient
    placement.until[2] = 2.05  # it is 2.0
    first, second = (waits(scheduler, size) for size in (1, 2))
    async with asyncio.timeout(20):
        chosen = await second
    assert chosen is not None
    assert chosen.reason == "late"
    assert not first.done()
    assert waiting_late(s) == 1
    assert placement.asked.count((2, math.inf)) == 1
    placement.ready = True
    after = await first
    assert after is not None
    for one in (chosen, after):
        scheduler.close(one.leases[0], Verdict.GOOD, 3.0)
    await settled()
    assert s.loads() == {}
    assert waiting_late(s) == 0


async def test_a_request_that_leaves_while_it_waits_holds_up_nobody(patient) -> None:
    placement, s, scheduler = patient
    first, second, last = (waits(scheduler, size) for size in (1, 2, 3))
    await settled()
    for task in (first, second):
        task.cancel()
    await settled()
    placement.ready = True
    chosen = await last
    assert chosen is not None
    assert {size for size, waited in placement.asked if waited} <= {1, 3}
    scheduler.close(chosen.leases[0], Verdict.GOOD, 3.0)
    await settled()
    assert s.loads() == {}
    assert waiting_late(s) == 0


async def test_a_request_that_waits_hears_that_it_is_refused(patient, monkeypatch) -> None:
    placement, _, scheduler = patient
    task = waits(scheduler, 1)
    await settled()
    monkeypatch.setattr(placement, "place", lambda *_: None)
    with pytest.raises(TooLateError):
        await task
