"""Clients that stream all the time, while a test changes something: none of them may see anything
of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdproxy.observe.events import LegFailed, RequestEnded
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.fakes.world import COMPLETIONS, PROMPT, World, completion
from tests.sim.engines import plain

TOKENS = 12
LONGER = BuiltInTokenizer().decode(
    plain(tuple(BuiltInTokenizer().encode(PROMPT)), TOKENS, model="tiny", eos_every=0)
)
"""What one engine alone says in that many tokens."""


class Streams:
    """Some clients. `served`: how many answers they have had, each whole and right."""

    def __init__(self) -> None:
        self.served = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    async def _ask(self, w: World) -> None:
        while not self._over.is_set():
            client = await w.client()
            client.post(COMPLETIONS, completion(stream=True, max_tokens=TOKENS))
            answer = await client.answer()
            assert answer.status == 200, answer.body
            assert answer.text == LONGER
            client.close()
            self.served += 1

    def look(self) -> None:
        """Fail now if a client has failed."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def more(self, count: int) -> None:
        """Wait until so many more answers have come."""
        wanted = self.served + count
        while self.served < wanted:
            self.look()
            await asyncio.sleep(0.005)


@asynccontextmanager
async def streaming(w: World, clients: int) -> AsyncIterator[Streams]:
    """Let so many clients stream. At the end no leg may have failed, and all requests have ended
    well.
    """
    made = Streams()
    made.tasks = [asyncio.create_task(made._ask(w)) for _ in range(clients)]
    try:
        yield made
        made._over.set()
        await asyncio.gather(*made.tasks)
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
    assert not w.events(LegFailed)
    assert {event.outcome for event in w.events(RequestEnded)} == {"ok"}
