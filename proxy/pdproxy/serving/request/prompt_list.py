"""A list of prompts, as one exchange per prompt: how many are under way, and what is kept of those that are over.

Owns the tasks of one list. Exchanges are made when their turn comes: of the others nothing exists but the place in the body
where their prompt stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdproxy.kit.errors import EngineRefusedError
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.request.merged_answer import MergedAnswer, MergedStream
from pdproxy.serving.request.totals import RequestTotals
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.serving.stream.whole_events import Parts
from pdproxy.upstream.connection import Headers
from pdproxy.wire.request import Parsed

PROMPTS_AT_ONCE = 16
"""Prompts of one list that are under way at once: a list takes one place of `limits.max_inflight`, and must not take all."""


class PromptList:
    """One list of prompts, served once. `begin` is called with the headers of the first stream that flows."""

    def __init__(
        self,
        engines: ExchangeResources,
        parsed: Parsed,
        heading: LegHeaders,
        output: ResponseWriter,
        begin: Callable[[Headers], None],
        tally: RequestTotals,
    ) -> None:
        self.parts = Parts()
        self.answer = MergedAnswer(engines.room.share(what="the engines sent answers"))
        self.usage_events: dict[int, bytes] = {}
        """Of streams, by their prompt's place in the list."""
        self._engines = engines
        self._parsed = parsed
        self._heading = heading
        self._begin = begin
        self._tally = tally
        self._stream = MergedStream(output)

    async def run(self) -> None:
        """Serve all prompts, in order, some at once. The first that fails or is refused ends the others and is raised."""
        try:
            await in_order(len(self._parsed.prompts), self._one)
        finally:
            self._stream.over()

    async def _one(self, index: int) -> None:
        exchange = Exchange(
            self._engines, self._parsed, self._parsed.prompts[index], self._heading, lambda: self._relay(index)
        )
        channel = self._stream.channel()

        def stream_to(relay: Relay) -> ResponseWriter:
            self._begin(relay.headers)
            return channel

        try:
            answer = await exchange.run(stream_to)
        finally:
            channel.over()
            self._tally.add(index, exchange)
        if answer is None:
            if exchange.relay is not None and exchange.relay.usage_event is not None:
                self.usage_events[index] = exchange.relay.usage_event
        elif answer.status == 200:
            self.answer.add(index, answer)
        else:
            raise EngineRefusedError("one of the prompts was refused", status=answer.status, body=answer.body)

    def _relay(self, index: int) -> Relay:
        return Relay(
            wants_usage=False,
            wants_done=False,
            index=index,
            keeps_usage=self._parsed.wants_usage,
            parts=self.parts,
            takes_ids=self._parsed.adds_ids,
            room=self._engines.room,
            now=self._engines.now,
        )


async def in_order(count: int, one: Callable[[int], Awaitable[None]]) -> None:
    """Do `one` for each number below `count`, in order, `PROMPTS_AT_ONCE` at once. The first that fails ends the others."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await one(number)

    tasks = [asyncio.ensure_future(some()) for _ in range(min(count, PROMPTS_AT_ONCE))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
