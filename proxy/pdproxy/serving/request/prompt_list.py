"""Serves a list of prompts, or a batch of chats, one exchange per prompt. A limited number of
exchanges runs at once.

Owns the tasks of one list. An exchange is made when its turn comes: until then, only the position
of its prompt in the body is kept. Of an exchange that has ended, its answer and its totals are
kept.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from pdproxy.kit.errors import EngineRefusedError, PdproxyError
from pdproxy.kit.frames import drop_traceback
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.request.demand import tokens_of
from pdproxy.serving.request.merged_answer import MergedAnswer, MergedStream
from pdproxy.serving.request.totals import RequestTotals
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.serving.stream.whole_events import CreationTime
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Headers
from pdproxy.wire.continuable import shows_ids
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route

PROMPTS_AT_ONCE = 16
"""Prompts of one list that run at once: a list takes one place of `limits.max_inflight`, and must
not fill all engines.
"""


class PromptList:
    """One list of prompts, served once. `begin` is called with the headers of each stream when its
    data begins.
    """

    def __init__(
        self,
        resources: ExchangeResources,
        parsed: Parsed,
        leg_headers: LegHeaders,
        output: ResponseWriter,
        begin: Callable[[Headers], None],
        totals: RequestTotals,
    ) -> None:
        self.creation_time = CreationTime()
        self.answer = MergedAnswer(
            resources.answer_budget.share(what="the engines sent answers"),
            chats=parsed.route is Route.BATCH,
        )
        self.usage_events: dict[int, bytes] = {}
        """The usage events of streams, by the index of their prompt in the list."""
        self.forced_usage = False
        """Whether an engine sent its usage without being asked for it: the client gets it."""
        self._resources = resources
        self._parsed = parsed
        self._leg_headers = leg_headers
        self._begin = begin
        self._totals = totals
        self._stream = MergedStream(output)
        self._running: dict[int, Exchange] = {}
        self._events = 0
        """Of those that have ended."""
        self._wrong: int | None = None
        """The prompt that was refused first."""

    @property
    def events(self) -> int:
        """How many events were sent to the client so far."""
        return self._events + sum(exchange.events for exchange in self._running.values())

    async def run(self) -> None:
        """Serve all prompts: begun in order, some at once. The first failure or refusal ends the
        others and is raised.
        """
        try:
            await in_order(len(self._parsed.prompts), self._one)
        finally:
            self._stream.close()

    async def _one(self, index: int) -> None:
        parsed, prompt = self._parsed.exchange_of(index)
        size, unseen = tokens_of(self._parsed.prompts[index]), 0 if parsed.stream else 1
        exchange = Exchange(
            self._resources, parsed, prompt, self._leg_headers, lambda: self._relay(index)
        )
        del parsed, prompt  # the exchange drops them once no engine needs them
        channel = self._stream.channel()

        def stream_to(relay: Relay) -> ResponseWriter:
            self._begin(relay.headers)
            return channel

        self._running[index] = exchange
        answer: Answer | None = None
        try:
            answer = await exchange.run(stream_to)
        finally:
            del self._running[index]
            self._events += exchange.events
            channel.close()
            streams = self._totals.add(index, exchange)
            meter = self._totals.meter
            if answer is None or answer.status == 200:
                before = meter.unseen
                meter.add(exchange, streams, size, unseen)
                # those behind it may be wrong in the same way
                if self._wrong is not None and index < self._wrong:
                    meter.lost += meter.unseen - before
            else:
                if self._wrong is None:
                    self._wrong = index
                meter.refuse(exchange)
        if answer is None:
            usage_event = exchange.usage_event
            if usage_event is not None:
                self.usage_events[index] = usage_event
                self.forced_usage = self.forced_usage or exchange.streams.keeps_usage
        elif answer.status == 200:
            self.answer.add(index, answer)
        else:
            raise EngineRefusedError(
                "one of the prompts was refused", status=answer.status, body=answer.body
            )

    def _relay(self, index: int) -> Relay:
        return Relay(
            wants_usage=False,
            wants_done=False,
            index=index,
            keeps_usage=self._parsed.wants_usage,
            creation_time=self.creation_time,
            takes_ids=self._parsed.adds_ids,
            shows_ids=shows_ids(self._parsed),
            budget=self._resources.answer_budget,
            templates=self._resources.templates,
            now=self._resources.now,
        )


async def in_order(count: int, one: Callable[[int], Awaitable[None]]) -> None:
    """Run `one` for each index below `count`, in order, `PROMPTS_AT_ONCE` at once. The first that
    fails ends the others.
    """
    indices = iter(range(count))

    async def run_next() -> None:
        for index in indices:
            await one(index)

    tasks = [asyncio.ensure_future(run_next()) for _ in range(min(count, PROMPTS_AT_ONCE))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, PdproxyError) and ended is not sys.exception():
                drop_traceback(ended)  # of a second one that has failed: its frames refer to it
