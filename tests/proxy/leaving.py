"""Clients of a pool of which many leave: at random moments, or each at its own."""

from __future__ import annotations

import asyncio
import random

from tests.fakes.client import request
from tests.fakes.pool import Pair
from tests.fakes.world import COMPLETIONS, PROMPT, completion


async def at_random(pair: Pair, count: int, together: int, seed: int) -> None:
    """So many clients, so many at once, of engines that are sometimes slow. Two of three leave
    within a tenth of a second.
    """
    chance = random.Random(seed)
    for engine in (pair.p, pair.d):
        engine.faults.add("slow@queued:delay=0.02,rate=0.5")

    async def one(number: int) -> None:
        client = await pair.world.client()
        body = completion(prompt=f"{number} {PROMPT * 3}", stream=bool(number % 2), max_tokens=20)
        client.send(request("POST", COMPLETIONS, body))
        if chance.random() < 0.67:
            await asyncio.sleep(chance.random() * 0.1)
        else:
            await client.answer()
        client.close()

    for begin in range(0, count, together):
        await asyncio.gather(*(one(number) for number in range(begin, begin + together)))


async def every_third(pair: Pair, count: int) -> None:
    """So many clients at once. Each third one leaves, at one of 17 moments; the others get their
    answers.
    """

    async def one(number: int) -> None:
        body = completion(prompt=f"{number} {PROMPT * 3}", stream=number % 2 == 0, max_tokens=6)
        if number % 3:
            assert (await pair.ask(COMPLETIONS, body)).status == 200
            return
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, body))
        await asyncio.sleep(number % 17 / 50)
        client.close()

    await asyncio.gather(*(one(number) for number in range(count)))
