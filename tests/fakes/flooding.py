"""A worker process that floods the scheduler process at SIGUSR1: part of the code of a proxy's
process.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.scheduler import ANY
from pdproxy.workers import scheduler_clients
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.worker_choices import ChoicesOfWorker

_ANSWER = 64
"""Bytes of the shortest answer to a choice."""


def _rubbish(link: SchedulerLink) -> None:
    """Send what is no message."""
    assert link._link is not None
    link._link._socket.send(b"\x00\x00\x00\x04what")


def _questions(link: SchedulerLink) -> None:
    """Ask for more engines than a worker may have."""
    for _ in range(scheduler_clients.MAX_OPEN // 2 + 2000):
        _ask(link)


def _deaf(link: SchedulerLink) -> None:
    """Read no answers, and ask for as many as the scheduler process keeps. Read again at
    SIGUSR2.
    """
    assert link._link is not None
    link._link.pause()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, link._link.resume)
    for _ in range(scheduler_clients.MAX_UNREAD // _ANSWER):
        number = _ask(link)
        link.tell(scheduler_clients.SchedulerClient.unwanted, 0, number)


def _ask(link: SchedulerLink) -> int:
    number = link.numbers(2)
    ask = Ask("tiny", 10, 1.0, 2)
    link.tell(ChoicesOfWorker.choose, 0, number, "flood", ask, ANY, None)
    return number


FLOODS: Mapping[str, Callable[[SchedulerLink], None]] = MappingProxyType(
    {"rubbish": _rubbish, "questions": _questions, "deaf": _deaf}
)
"""By their names."""


def install(flood: str, part: int) -> None:
    """Have the workers of this process flood at the signal. `part`: what the bounds of the
    scheduler process are divided by.
    """
    scheduler_clients.MAX_OPEN //= part
    scheduler_clients.MAX_UNREAD //= part
    connect = SchedulerLink.connect

    def connected(link: SchedulerLink, end: socket.socket) -> None:
        connect(link, end)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, partial(FLOODS[flood], link))

    SchedulerLink.connect = connected  # type: ignore[method-assign, assignment]
