"""The demo's own traffic: a few people who chat, each with random pauses, as clients of the proxy.

Owns the tally. Every request has deadlines, every stream is read to its end and checked; an answer
that is not whole is counted as failed, with the reason.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.demo.tally import Tally

TOTAL, SILENCE = 120.0, 30.0
"""Seconds: for a whole answer, and for a pause within it."""
AFTER_FAILURE = 1.0
"""Seconds before the next try after a failed request."""
_TOPICS = (
    "Tell me about lighthouses, their keepers, and the storms they saw.",
    "Write a function that merges overlapping intervals, and explain how it works.",
    "What should I cook tonight? I have rice, eggs, spinach and too little time.",
    "Summarize how a compiler turns source code into a program that runs.",
    "Plan a walk of three days along a coast for people who dislike hills.",
    "Why is the sky blue at noon and red in the evening?",
)
_FOLLOW_UPS = (
    "Go on.",
    "Shorter, please.",
    "Why?",
    "Give an example.",
    "And what could go wrong with that?",
)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class BrokenAnswerError(Exception):
    """An invalid answer; the text says why."""


class Traffic:
    """`people` who chat with one server. Start it and stop it inside one event loop."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        people: int,
        pause: float,
        context: int,
        chance: random.Random,
    ) -> None:
        """Make them; `pause` seconds on average between an answer and the next question, `context`
        tokens fit.
        """
        self.tally = Tally()
        self._url, self._model = url, model
        self._people, self._pause, self._context = people, pause, context
        self._chance = chance
        self._tasks = TaskOwner("traffic")
        self._ending = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Begin to chat."""
        timeout = aiohttp.ClientTimeout(total=TOTAL, sock_connect=5.0, sock_read=SILENCE)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        for number in range(self._people):
            self._tasks.spawn(self._chat_on(self._session), f"person {number}")

    async def stop(self, grace: float) -> None:
        """Send nothing more, let current answers end within `grace` seconds, cut off the others."""
        self._ending.set()
        try:
            await self._tasks.settle(grace)
        finally:
            if self._session is not None:
                await self._session.close()

    async def _chat_on(self, session: aiohttp.ClientSession) -> None:
        """Hold one conversation after the other until all is to end."""
        going = await self._pauses(self._chance.uniform(0.0, self._pause))
        while going:
            messages: list[dict[str, str]] = []
            used = 0
            for _ in range(self._chance.randint(1, 6)):
                longest = self._chance.choice((16, 48, 96, 160))
                if messages and used + 2 * longest > self._context // 2:
                    break
                words = self._chance.choice(_FOLLOW_UPS if messages else _TOPICS)
                messages.append({"role": "user", "content": words})
                answer, used = await self._ask(session, messages, longest)
                pause = (
                    self._chance.expovariate(1 / self._pause)
                    if answer is not None
                    else AFTER_FAILURE
                )
                going = await self._pauses(pause)
                if answer is None or not going:
                    break
                messages.append({"role": "assistant", "content": answer})

    async def _pauses(self, seconds: float) -> bool:
        """Wait so long; return False at once when all is to end."""
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            return True
        return False

    async def _ask(
        self, session: aiohttp.ClientSession, messages: Sequence[dict[str, str]], longest: int
    ) -> tuple[str | None, int]:
        """Return the answer and the tokens of the conversation so far; None if it failed."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": longest,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.tally.sent += 1
        try:
            answer = await read_chat(session, f"{self._url}/v1/chat/completions", body)
        except asyncio.CancelledError:
            self.tally.cut += 1
            raise
        except BrokenAnswerError as error:
            self.tally.failures[str(error)] += 1
        except TimeoutError:
            self.tally.failures["too late"] += 1
        except aiohttp.ClientError as error:
            self.tally.failures[_name(error)] += 1
        else:
            self.tally.whole += 1
            return answer
        return None, 0


async def read_chat(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[str, int]:
    """Return a streamed chat's text and its count of tokens.

    Raises:
        BrokenAnswerError: an error status, an error event, or a stream that did not end as it
            should.
        TimeoutError, aiohttp.ClientError: the connection.
    """
    text: list[str] = []
    used, finished, done = 0, False, False
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            raise BrokenAnswerError(f"with status {answer.status}")
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = msgspec.json.decode(data, type=_Event)
            except msgspec.MsgspecError:
                raise BrokenAnswerError("with an event that is no chunk") from None
            if event.error is not None:
                raise BrokenAnswerError("by an error event")
            for choice in event.choices:
                text.append(choice.delta.content or "")
                finished = finished or choice.finish_reason is not None
            used = event.usage.total_tokens if event.usage is not None else used
    if not (finished and done):
        raise BrokenAnswerError("by a stream that broke off")
    return "".join(text), used


def _name(error: aiohttp.ClientError) -> str:
    return f"with {type(error).__name__.removesuffix('Error')}"
