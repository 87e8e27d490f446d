"""How the scheduler process tells workers what it knows of engines.

Owns which engines each worker has to be told of. What has changed in one turn of the event loop is
one message. For a worker that does not read, what has changed is a set of engines and no queue: it
is told what is known last, once it reads again. A worker that connects is told of all engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks

AGAIN = 0.1
"""Seconds until a worker that does not read is looked at again."""


class Telling:
    """Tells of one topic. `every`: the URLs of all engines; `body`: returns a message about some;
    `at_once`: of how many at most.
    """

    def __init__(
        self,
        links: SchedulerLinks,
        topic: str,
        every: Iterable[str],
        body: Callable[[Iterable[str]], bytes],
        at_once: int,
    ) -> None:
        self._links = links
        self._topic = topic
        self._every = every
        self._body = body
        self._at_once = at_once
        self._due: dict[str, None] = {}
        self.behind: dict[SchedulerClient, dict[str, None]] = {}
        """Workers that have to be told more, and of which engines. Read only."""
        links.greets.append(self._greet)
        links.leaves.append(self._left)

    def __repr__(self) -> str:
        return f"<Telling of {self._topic}, {len(self.behind)} workers behind>"

    def post(self, url: str) -> None:
        """Tell all workers of an engine at the end of this turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._tell)
        self._due[url] = None

    def _tell(self) -> None:
        urls, self._due = self._due, {}
        body = self._body(urls) if len(urls) <= self._at_once else None
        for client in self._links.clients:
            if client in self.behind or client.is_behind or body is None:
                self._tell_later(client, urls)
            else:
                client.say(self._topic, body)

    def _greet(self, client: SchedulerClient) -> None:
        self._tell_later(client, dict.fromkeys(self._every))

    def _left(self, client: SchedulerClient) -> None:
        self.behind.pop(client, None)

    def _tell_later(self, client: SchedulerClient, urls: Mapping[str, None]) -> None:
        if client in self.behind:
            self.behind[client].update(urls)
        else:
            self.behind[client] = dict(urls)
            self._catch_up(client)

    def _catch_up(self, client: SchedulerClient) -> None:
        """Tell a worker of some of the engines that it has to be told of, if it reads."""
        urls = self.behind.get(client)
        if urls is None:
            return  # it has left
        if not client.is_behind:
            some = [*islice(urls, self._at_once)]
            client.say(self._topic, self._body(some))
            for url in some:
                del urls[url]
        if urls:  # in the next turn it shows whether it reads
            pause = AGAIN if client.is_behind else 0.0
            asyncio.get_running_loop().call_later(pause, self._catch_up, client)
        else:
            del self.behind[client]
