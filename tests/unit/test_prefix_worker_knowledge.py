"""Workers that tell each other what they have sent to engines find as much in the engines' caches
as one process.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from functools import cache, partial

import pytest

from pdproxy.app import worker_prefixes
from pdproxy.app.worker_prefixes import SEND_EVERY, SharingPrefixes
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import policies, worker_breakers, worker_ledger
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix import worker_knowledge
from pdproxy.scheduling.prefix.block_index import BlockIndex
from pdproxy.scheduling.prefix.keys import PromptKeys
from pdproxy.scheduling.prefix.prompts import MAX_KEYS, PromptBeginning
from pdproxy.scheduling.prefix.refreshing import Refreshing
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy.scheduling.prefix.speculative import SpeculativeIndex
from pdproxy.scheduling.prefix.worker_knowledge import BATCH, MAX_WAITING, WorkerKnowledge
from pdproxy.scheduling.worker_breakers import WorkerBreakers
from pdproxy.scheduling.worker_ledger import LedgerShare, WorkerLedger
from tests.fakes.clock import later_turns

UNIT = 16
ENGINES, CAPACITY = 8, 1200
"""Engines, and KV blocks of each."""
EVIDENCE = Evidence(frozenset({"m"}), "1", UNIT, ((1, 2),), 5, 1.0, kv_blocks=CAPACITY)
SPECS = [EngineSpec(f"a{at}", Role.AGGREGATED) for at in range(ENGINES)]


def knowledge() -> WorkerKnowledge:
    """What a worker knows of the engines at first."""
    made = WorkerKnowledge(
        UNIT,
        BlockIndex(UNIT, 1000),
        RoutedIndex(CAPACITY, 100_000),
        SpeculativeIndex(2.0, 1000),
        Refreshing(on=False),
    )
    for spec in SPECS:
        made.add(spec.url, UNIT, CAPACITY)
    return made


def beginning(keys: list[int], *, of_text: bool = False) -> PromptBeginning:
    return PromptBeginning(
        PromptKeys(UNIT, iter([keys])), len(keys) * UNIT + 1, UNIT, of_text=of_text
    )


class Cache:
    """An engine's prefix cache: the least recently used blocks go, of one prompt the last ones
    first.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}

    def serves(self, keys: list[int]) -> int:
        """Compute a prompt. Return how many of its blocks were there."""
        found = next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))
        for key in reversed(keys):
            self.blocks.pop(key, None)
            self.blocks[key] = None
        for key in list(itertools.islice(self.blocks, max(0, len(self.blocks) - CAPACITY))):
            del self.blocks[key]
        return found


def prompts(seed: int, count: int) -> Iterable[list[int]]:
    """Turns of 240 conversations at a time, each behind the prompt of one of 12 applications."""
    chance = random.Random(seed)
    numbers = itertools.count(1)
    applications = [[next(numbers) for _ in range(20)] for _ in range(12)]
    open_ones: list[list[int]] = []
    for _ in range(count):
        if len(open_ones) < 240:
            open_ones.append([*chance.choice(applications)])
        at = chance.randrange(len(open_ones))
        turn = open_ones[at] = [
            *open_ones[at],
            *(next(numbers) for _ in range(chance.randrange(1, 8))),
        ]
        yield turn
        if len(turn) > 60:
            del open_ones[at]


class Run:
    """So many workers serve prompts at a rate, in simulated time. `tells`: whether they tell each
    other what they sent.
    """

    def __init__(self, workers: int, *, tells: bool = True, late: float = 0.005) -> None:
        loads = SharedTable(workers, 16, worker_ledger.MEASURES)
        breakers = SharedTable(workers, 16, worker_breakers.MEASURES, worker_breakers.KEPT)
        self.known = [knowledge() for _ in range(workers)]
        self.ledgers = [self._ledger(number, loads, breakers) for number in range(workers)]
        self.caches = {spec.url: Cache() for spec in SPECS}
        self.late = late
        self.now = self.at = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.ages: list[float] = []
        for number, one in enumerate(self.known):
            if tells:
                one.due = partial(self._after, SEND_EVERY, partial(self._send, number))

    def _ledger(self, number: int, loads: SharedTable, breakers: SharedTable) -> WorkerLedger:
        make = partial(
            WorkerBreakers,
            column=breakers.column(number),
            others=breakers.others(number),
            number=number,
        )
        made = WorkerLedger(
            SPECS,
            LedgerOptions(
                breaker_failures=3,
                breaker_cooldown=10,
                policies=dict.fromkeys((Role.PREFILL, Role.DECODE), policies.POLICIES["prefix"]),
                cached=lambda ask: self.known[number].cached(ask),
            ),
            LedgerShare(*loads.of(number), make),
        )
        for spec in SPECS:
            made.mark_up(spec.url, EVIDENCE)
        return made

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), then))

    def _send(self, number: int) -> None:
        if (body := self.known[number].batch()) is not None:
            self._after(self.late, lambda: self._take(number, body))

    def _take(self, sender: int, body: bytes) -> None:
        batch = worker_knowledge.decode(body)
        self.ages.append(self.now - batch.since)
        for number, one in enumerate(self.known):
            if number != sender:
                for sent in batch.sent:
                    one.take(sent, self.now)

    def share(self, seed: int, count: int = 3000, rate: float = 200.0) -> float:
        """Serve prompts, each by any of the workers. Return the part of their blocks that was in
        the engines' caches.
        """
        chance = random.Random(seed)
        blocks = cached = 0
        for keys in prompts(seed, count):
            number = chance.randrange(1 << 16) % len(self.ledgers)
            blocks += len(keys)
            cached += self.serve(number, keys, chance, rate)
        return cached / blocks

    def serve(
        self, number: int, keys: list[int], chance: random.Random, rate: float = 200.0
    ) -> int:
        """Serve the next prompt by a worker. Return how many of its blocks were in its engine's
        cache.
        """
        at = self.at = self.at + chance.expovariate(rate)
        while self._due and self._due[0][0] <= at:
            self.now, _, then = heapq.heappop(self._due)
            then()
        self.now = at
        known, ledger, begins = self.known[number], self.ledgers[number], beginning(keys)
        lease = ledger.assign_alone(Ask("m", 100, at, tokens=begins.tokens, beginning=begins))
        assert lease is not None
        known.routed(begins, lease.engine.url, at)
        self._after(chance.uniform(0.1, 0.5), partial(self._ends, number, lease))
        return self.caches[lease.engine.url].serves(keys)

    def restart(self, number: int) -> WorkerKnowledge:
        """Have a worker begin anew. Return what it knows."""
        made = self.known[number] = knowledge()
        made.due = partial(self._after, SEND_EVERY, partial(self._send, number))
        return made

    def _ends(self, number: int, lease: Lease) -> None:
        self.ledgers[number].close(lease, Verdict.GOOD, self.now)


@cache
def with_one() -> float:
    """The part of the blocks that one process finds in the caches."""
    return Run(1).share(1)


@pytest.mark.parametrize("workers", [2, 8])
def test_as_much_is_cached_as_with_one_process(workers: int) -> None:
    """Within 0.02 of one process's. Of what they know of each other nothing is older than a batch
    and its way.
    """
    one, several = with_one(), Run(workers)
    share = several.share(1)
    assert one > 0.6
    assert abs(share - one) <= 0.02, (one, share)
    assert max(several.ages) <= SEND_EVERY + several.late + 1e-6


def test_workers_that_tell_nothing_find_less() -> None:
    """So the run above shows that it matters."""
    assert Run(8, tells=False).share(1) < with_one() - 0.05


def test_what_is_told_late_costs_little() -> None:
    """A quarter of a second, as while the parent or a worker is busy: a conversation's next turn
    comes later.
    """
    assert Run(4, late=0.25).share(1) >= with_one() - 0.02


def test_what_another_worker_has_sent_is_known() -> None:
    first, second = knowledge(), knowledge()
    first.routed(beginning([1, 2, 3]), "a1", 5.0)
    first.routed(beginning([7, 8], of_text=True), "a2", 6.0)
    body = first.batch()
    assert body is not None
    batch = worker_knowledge.decode(body)
    assert batch.since == 5.0
    assert [second.take(one, 7.0) for one in batch.sent] == [3, 2]
    assert second.found(beginning([1, 2, 3, 4]), 7.0) == {"a1": 48}
    assert second.found(beginning([7, 8, 9], of_text=True), 7.0) == {"a2": 32}
    assert second.batch() is None, "it is not told again"
    assert first.batch() is None


def test_a_text_that_an_engine_turned_out_not_to_have_is_forgotten_by_all() -> None:
    first, second = knowledge(), knowledge()
    for one in (first, second):
        one.routing.routed(one._engines["a1"].place, [[1, 2]])
    prediction = first.routed(beginning([1, 2], of_text=True), "a1", 5.0)
    assert prediction is not None
    first.answered(prediction, 0, 33)
    body = first.batch()
    assert body is not None
    for sent in worker_knowledge.decode(body).sent:
        second.take(sent, 6.0)
    assert second.found(beginning([1, 2, 3], of_text=True), 6.0) == {}


def test_an_engine_that_a_worker_does_not_have_is_ignored() -> None:
    first, second = knowledge(), knowledge()
    second.remove("a1")
    first.routed(beginning([1, 2, 3]), "a1", 5.0)
    body = first.batch()
    assert body is not None
    assert second.take(worker_knowledge.decode(body).sent[0], 6.0) == 3
    assert second.found(beginning([1, 2, 3, 4]), 6.0) == {}


def test_what_waits_to_be_told_has_a_bound() -> None:
    """Prompts beyond it are counted, and known to their own worker. A message has a bound, too."""
    one = knowledge()
    count = MAX_WAITING // MAX_KEYS
    for at in range(count + 3):
        one.routed(beginning([at * MAX_KEYS + key for key in range(MAX_KEYS)]), "a1", float(at))
    assert one.untold == 3
    sizes = []
    while (body := one.batch()) is not None:
        assert len(body) <= 8 * BATCH + 1000
        sizes.append(sum(len(sent.keys) // 8 for sent in worker_knowledge.decode(body).sent))
    assert sum(sizes) == count * MAX_KEYS
    assert max(sizes) == BATCH
    one.routed(beginning([1]), "a1", 1.0)
    assert one.batch() is not None


async def test_messages_are_sent_in_batches_and_taken_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In between other work has its turn; what is too much is dropped and counted; the age is that
    of the last prompt.
    """
    monkeypatch.setattr(worker_prefixes, "SEND_EVERY", 0.0)
    monkeypatch.setattr(worker_prefixes, "MAX_QUEUED", 3 * MAX_KEYS)
    first, second = knowledge(), knowledge()
    told: list[bytes] = []
    sends = SharingPrefixes(first, told.append, lambda: 10.0)
    takes = SharingPrefixes(second, told.append, lambda: 12.5)
    for at in range(4):
        first.routed(beginning([at * MAX_KEYS + key for key in range(MAX_KEYS)]), "a1", 10.0)
    assert told == []
    while len(told) < 2:
        await asyncio.sleep(0)
    for body in told:
        takes.received(body)
    assert takes.dropped == 1
    taken = []
    for _ in range(4):
        await asyncio.sleep(0)
        taken.append(len(second.routing))
    assert taken[0] <= CAPACITY
    assert takes._queued == 0
    assert takes.age == 2.5
    behind = True
    sends.is_behind = lambda: behind
    first.routed(beginning([1, 2]), "a1", 11.0)
    await later_turns()
    assert len(told) == 2  # it waits with what is to be told, not with messages
    behind = False
    await later_turns()
    assert len(told) == 3
    sends.stop()
    first.routed(beginning([3, 4]), "a1", 11.0)
    await later_turns()
    assert len(told) == 3
