"""The worker's end of its link to the supervisor: what it sends while nobody reads, and before its
end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from pdproxy.app.signals import Ending, Hangups
from pdproxy.workers import links, worker
from pdproxy.workers.links import Link, Message, pair
from pdproxy.workers.supervisor import DRAIN, ENDS_WITHIN
from pdproxy.workers.switchboard import REPORT
from pdproxy.workers.worker import Orders
from tests.fakes.world import until

MIB = 1 << 20


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Orders, Link, list[int]]]:
    """A worker's end, the supervisor's, and the exit codes with which the worker would have
    ended.
    """
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    parents, end = pair()
    orders, link = Orders(end, Ending(), Hangups()), Link(parents)
    yield orders, link, codes
    loop = asyncio.get_running_loop()
    loop.remove_reader(end)
    loop.remove_writer(end)
    end.close()
    link.close()


async def test_a_supervisor_that_stands_still_ends_no_worker(
    ends: tuple[Orders, Link, list[int]],
) -> None:
    """Reports of an hour are not kept for it, and it gets the newest once it reads again."""
    orders, link, codes = ends
    for number in range(3600):
        orders.send(Message(REPORT, number, body=bytes(MIB)))
    assert not codes
    assert orders._link.unsent < worker.MAX_BEHIND + 2 * MIB
    found: list[int] = []

    def read() -> bool:
        found.extend(message.number for message in link.read())
        return not orders._link.unsent and bool(found)

    await until(read)
    orders.send(Message(REPORT, 3600, body=b"x"))
    await until(lambda: read() and found[-1] == 3600)
    assert len(found) < 20


async def test_the_last_report_is_sent_before_the_end(ends: tuple[Orders, Link, list[int]]) -> None:
    """It is larger than what a socket takes at once."""
    orders, link, _ = ends
    body = os.urandom(3 * MIB)
    orders.send(Message(REPORT, body=body))
    sent = asyncio.create_task(orders.all_sent())
    await asyncio.sleep(0)
    assert not sent.done()
    found: list[Message] = []

    def read() -> bool:
        found.extend(link.read())
        return sent.done()

    await until(read)
    while not found:
        found += link.read()
    assert [one.body == body for one in found] == [True]
    await orders.all_sent()


async def test_nobody_waits_for_a_supervisor_that_does_not_read(
    ends: tuple[Orders, Link, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LAST_WORDS", 0.05)
    orders, _, codes = ends
    orders.send(Message(REPORT, body=bytes(3 * MIB)))
    await orders.all_sent()
    assert orders._link.unsent
    assert not codes


async def test_what_is_too_long_is_not_sent(
    ends: tuple[Orders, Link, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker serves on; the log says it."""
    monkeypatch.setattr(links, "MAX_MESSAGE", 1000)
    orders, link, codes = ends
    orders.send(Message(REPORT, body=bytes(2000)))
    orders.send(Message(REPORT, 7))
    assert [message.number for message in link.read()] == [7]
    assert not codes
    assert "not sent: a message 'report' of 20" in caplog.text


async def test_one_message_that_fails_loses_none_behind_it(
    ends: tuple[Orders, Link, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the log, without what it says; the worker drains, and says how long that may take
    now.
    """
    orders, link, codes = ends

    def fail(message: Message) -> None:
        raise ValueError("a secret")

    orders.then, orders.ends_within = fail, lambda: 3600.5
    link.send(Message("told", body=b"x"))
    link.send(Message(DRAIN))
    found: list[Message] = []

    def read() -> bool:
        found.extend(link.read())
        return bool(found)

    await until(read)
    assert orders._ending.requested.is_set()
    assert found == [Message(ENDS_WITHIN, 3601)]
    assert "a message 'told' of the supervisor failed: ValueError" in caplog.text
    assert "a secret" not in caplog.text
    assert not codes


async def test_a_worker_says_why_it_ends(
    ends: tuple[Orders, Link, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else could: its supervisor is gone, or reads nothing."""
    orders, link, codes = ends
    link.close()
    orders.send(Message(REPORT))
    assert codes
    assert "the supervisor can't be reached: Broken pipe" in caplog.text
