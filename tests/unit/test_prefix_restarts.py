"""A worker that is started again gets what the others know of engines' prefix caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from pdproxy.app import worker_prefixes
from pdproxy.app.worker_prefixes import SharingPrefixes
from pdproxy.scheduling.prefix import worker_knowledge
from pdproxy.scheduling.prefix.prompts import MAX_KEYS
from pdproxy.scheduling.prefix.worker_knowledge import BATCH, KEPT_PARTS, WorkerKnowledge
from tests.unit.test_prefix_worker_knowledge import (
    CAPACITY,
    SPECS,
    Run,
    beginning,
    knowledge,
    prompts,
    with_one,
)


def sharing(known: WorkerKnowledge, told: list[bytes] | None = None) -> SharingPrefixes:
    return SharingPrefixes(known, (told if told is not None else []).append, lambda: 10.0)


def asks(leader: SharingPrefixes) -> Callable[[str], Awaitable[bytes | None]]:
    """How another worker asks the one that leads."""

    async def ask(about: str) -> bytes | None:
        await asyncio.sleep(0)
        return leader.answer(about)

    return ask


async def caught_up(late: WorkerKnowledge, leader: WorkerKnowledge) -> None:
    await sharing(late).catch_up(asks(sharing(leader)), lambda: True)


def order(known: WorkerKnowledge) -> dict[str, list[int]]:
    """The keys of each engine, the most recently used first."""
    return {
        spec.url: known.routing.newest(known.place_of(spec.url) or 0, 0, 10**6) for spec in SPECS
    }


async def hits_of_a_restarted_worker(*, told: bool) -> float:
    """The part of its prompts' blocks that are cached, of the first 150 behind its restart, of four
    workers.
    """
    run, chance = Run(4), random.Random(3)
    blocks = cached = served = 0
    for at, keys in enumerate(prompts(3, 5000)):
        if at == 3000:
            late = run.restart(1)
            if told:
                await caught_up(late, run.known[0])
        number = chance.randrange(4)
        found = run.serve(number, keys, chance)
        if at >= 3000 and number == 1 and served < 150:
            blocks, cached, served = blocks + len(keys), cached + found, served + 1
    assert served == 150
    return cached / blocks


async def test_a_restarted_worker_finds_as_much_as_before() -> None:
    """Within 0.03 of what one process finds; without what the others know it would find much
    less.
    """
    told, alone = (
        await hits_of_a_restarted_worker(told=True),
        await hits_of_a_restarted_worker(told=False),
    )
    print(f"hits of a restarted worker: {told:.3f}, {alone:.3f} without what the others know")
    assert told >= with_one() - 0.03
    assert alone < told - 0.05


async def test_it_knows_the_same_in_the_same_order() -> None:
    """Also of texts, of many parts, and of an engine with more than is passed on: then the
    newest.
    """
    leader, late = knowledge(), knowledge()
    for one in (leader, late):
        one.routing.set_capacity(one.place_of("a0") or 0, 10**6)
        one.routing.max_keys = 10**6
    count = KEPT_PARTS * BATCH
    for begin in range(0, count + 3 * MAX_KEYS, MAX_KEYS):
        leader.routed(beginning([-1 - begin - key for key in range(MAX_KEYS)]), "a0", 1.0)
    leader.routed(beginning([1, 2, 3]), "a1", 1.0)
    leader.routed(beginning([4, 5], of_text=True), "a2", 1.0)
    await caught_up(late, leader)
    expected = order(leader)
    assert order(late) == {**expected, "a0": expected["a0"][:count]}
    assert late._by_routing == {"a0", "a1"}
    assert late.found(beginning([1, 2, 3, 9]), 2.0) == {"a1": 48}
    assert late.batch() is None, "the others know it"


async def test_what_is_sent_meanwhile_counts_as_later() -> None:
    """By others and by the worker itself: of a full engine, what another one knew goes first."""
    leader, late = knowledge(), knowledge()
    leader.routed(beginning(list(range(1, CAPACITY + 1))), "a1", 1.0)
    told: list[bytes] = []
    takes, gives = sharing(late, told), sharing(leader)
    asked: list[str] = []
    ask = asks(gives)

    async def busy(about: str) -> bytes | None:
        asked.append(about)
        if len(asked) == 2:
            other = knowledge()
            other.routed(beginning([-1, -2]), "a1", 2.0)
            body = other.batch()
            assert body is not None
            takes.received(body)
            late.routed(beginning([-3, -4]), "a1", 2.0)
            takes._send()
            assert len(told) == 1
        return await ask(about)

    await takes.catch_up(busy, lambda: True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    newest = order(late)["a1"]
    assert newest[:4] == [-3, -4, -1, -2]
    assert newest[4:] == list(range(1, CAPACITY - 3))
    assert asked == ["", "0 a1", "1 a1"]
    takes.stop()


async def test_an_engine_that_starts_again_meanwhile_has_an_empty_cache() -> None:
    leader, late = knowledge(), knowledge()
    leader.routed(beginning([1, 2, 3]), "a1", 1.0)
    ask = asks(sharing(leader))

    async def busy(about: str) -> bytes | None:
        if about.startswith("1 "):
            late.restarted("a1")
        return await ask(about)

    await sharing(late).catch_up(busy, lambda: True)
    assert order(late)["a1"] == []
    late.remove("a1")
    await caught_up(late, leader)
    assert late.place_of("a1") is None, "an engine that is not there yet"


async def test_the_leader_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks again until someone answers."""
    monkeypatch.setattr(worker_prefixes, "AGAIN", 0.0)
    leader, late = knowledge(), knowledge()
    leader.routed(beginning([1, 2, 3]), "a1", 1.0)
    gives, asked, ready = sharing(leader), 0, 0

    async def ask(about: str) -> bytes | None:
        nonlocal asked
        asked += 1
        return None if asked < 4 else gives.answer(about)

    def probed() -> bool:
        nonlocal ready
        ready += 1
        return ready > 2

    await sharing(late).catch_up(ask, probed)
    assert order(late)["a1"] == [1, 2, 3]
    assert (asked, ready) == (6, 3)


async def test_who_does_not_answer_holds_up_nothing_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was told meanwhile is taken in then."""
    monkeypatch.setattr(worker_prefixes, "PATIENCE", 0.02)
    other, late = knowledge(), knowledge()
    other.routed(beginning([1, 2]), "a1", 1.0)
    body = other.batch()
    assert body is not None
    takes = sharing(late)

    async def ask(about: str) -> bytes | None:
        takes.received(body)
        assert order(late)["a1"] == []
        await asyncio.sleep(3600)
        return None

    await takes.catch_up(ask, lambda: True)
    await asyncio.sleep(0)
    assert order(late)["a1"] == [1, 2]


def test_a_part_has_a_bound() -> None:
    known = knowledge()
    known.routing.set_capacity(known.place_of("a1") or 0, 10**6)
    for begin in range(0, 3 * BATCH, MAX_KEYS):
        known.routed(beginning([1 + begin + key for key in range(MAX_KEYS)]), "a1", 1.0)
    assert [len(known.part("a1", number).keys) // 8 for number in range(5)] == [
        BATCH,
        BATCH,
        BATCH,
        0,
        0,
    ]
    assert known.part("a1", KEPT_PARTS) == worker_knowledge.KeysPart()
    assert known.part("nowhere", 0) == worker_knowledge.KeysPart()
    known.routed(beginning([1]), "a2", 1.0)
    assert known.sent_to() == ["a1", "a2"]
