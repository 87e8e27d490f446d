"""What checks work with: a proxy before one pair of engines, the same engines asked directly, and their own counters.

Owns how a prompt is sent through the pair and what is learned of it on the way. Whether that is right is the checks' affair.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdproxy.fleet.audit import LOCAL_HIT
from pdproxy.lab.check.ask import Asker
from pdproxy.lab.check.engines import Miss, scrape
from pdproxy.lab.check.facts import EngineFacts
from pdproxy.lab.check.metrics import Metrics
from pdproxy.lab.conformance import questions
from pdproxy.lab.conformance.answers import Said
from pdproxy.lab.conformance.asking import Client, Place
from pdproxy.lab.conformance.options import Options
from pdproxy.lab.conformance.questions import Question, Shape
from pdproxy.lab.conformance.results import FailedError, NotJudgedError
from pdproxy.lab.conformance.stand import Stand
from pdproxy.observe.events import LegFailed, RequestEnded
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract, no_notices

_NOTHING = 1e-9


class Arrived(msgspec.Struct, frozen=True):
    """Prompt tokens that a decode engine counted: come by KV transfer, and found in its own cache."""

    moved: int
    cached: int

    @property
    def all(self) -> int:
        """Tokens that it did not compute."""
        return self.moved + self.cached


class Split(msgspec.Struct, frozen=True):
    """A prompt that went through the proxy. `arrived` None: D was not asked, or its counters can't be read."""

    question: Question
    said: Said
    ended: RequestEnded
    arrived: Arrived | None
    asked_decode: bool
    since: int
    """Where in the tap's log it begins."""


class Usage(msgspec.Struct, frozen=True):
    """How much KV both engines held at some time, as shares of their memory; and the leases that had ended by themselves."""

    prefill: float
    decode: float
    expired: float


@dataclass
class Bench:
    """One pair of engines. `mark` returns something fresh each time."""

    stand: Stand
    prefill: EngineFacts
    decode: EngineFacts
    settings: Settings
    options: Options
    client: Client
    asker: Asker
    at: Callable[[str], Place]
    """Where an engine is asked, by its URL."""
    mark: Callable[[], str]
    model: str = ""
    doing: str = ""
    """What is being waited for, for the report of a check that does not end."""

    @property
    def contract(self) -> Contract:
        """The contract that is being proven."""
        return self.stand.proxy.transfer.contract

    @property
    def has_notices(self) -> bool:
        """Whether engines tell that KV is ready."""
        return self.contract.notices is not no_notices

    @property
    def granule(self) -> int:
        """How many tokens move as one, at least."""
        block = self.decode.block_size or 1
        return max(block, self.settings.pool.lmcache.chunk_size) if self.has_notices else block

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that both take."""
        limits = [limit for limit in (self.prefill.max_model_len, self.decode.max_model_len) if limit is not None]
        return min(limits, default=None)

    # -- asking

    def question(self, shape: Shape, text: str | None = None, **more: object) -> Question:
        """Return a request; without a text, for one whose KV must move."""
        mark = self.mark()
        if text is None:
            text = questions.moving(mark, self.granule, self.max_model_len)
        return questions.question(shape, self.model, text, f"conformance-{mark}", **more)

    async def split(self, question: Question, stand: Stand | None = None, alone_for: str | None = None) -> Split:
        """Send a request through the proxy. `alone_for`: a reason for which one engine alone may serve it.

        Raises:
            FailedError: it was not answered, or not by both engines.
        """
        stand = stand or self.stand
        self.doing = f"a {question.shape.words} through the proxy"
        since, before = stand.tap.mark(), await self.scraped(self.decode.url)
        said = await self.client.ask(Place(stand.url, stand.key), question)
        what = question.shape.words
        if isinstance(said, Miss):
            raise FailedError(f"a {what} through the proxy: {said.text}")
        ended = await stand.tap.ended(question.request_id, self.options.settle)
        if ended is None:
            raise FailedError(f"a {what} was answered, and is not over for the proxy {self.options.settle:g} s later")
        for leg in ended.legs:
            if leg.why_alone not in (None, alone_for):
                failures = "; ".join(event.error for event in stand.tap.events(LegFailed, since))
                why = f" ({failures})" if failures else ""
                raise FailedError(f"a {what} was served by one engine alone: {leg.why_alone}{why}")
        asked = bool(stand.tap.legs(since, self.decode.url))
        due = self.due(said.prompt_tokens)
        arrived = await self.arrived(before, due) if asked else None
        return Split(question, said, ended, arrived, asked, since)

    async def alone(self, place: Place, question: Question) -> Said:
        """Have an engine answer a question by itself.

        Raises:
            NotJudgedError: it does not.
        """
        self.doing = f"a {question.shape.words} of {place.url} by itself"
        asked = questions.salted(question, self.mark(), f"conformance-alone-{self.mark()}")
        said = await self.client.ask(place, asked)
        if isinstance(said, Miss):
            raise NotJudgedError(f"{place.url}, asked for the same by itself: {said.text}")
        return said

    # -- counters

    async def scraped(self, url: str) -> Metrics | None:
        """Return an engine's metrics, None if they can't be read."""
        return await scrape(self.asker, url)

    def due(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt must not have been computed by D.

        All whole granules, but where there are several not the last one: some models compute a prompt's last tokens again.
        """
        whole = prompt_tokens // self.granule
        return (whole if whole <= 1 else whole - 1) * self.granule

    async def arrived(self, before: Metrics | None, due: int) -> Arrived | None:
        """Return what has arrived at D since a reading, once that is enough, or has had its time. None: not counted."""
        if before is None or not before.by_source:
            return None
        end = time.monotonic() + self.options.settle
        while True:
            after = await self.scraped(self.decode.url)
            if after is not None:
                cached = after.by_source.get(LOCAL_HIT, 0.0) - before.by_source.get(LOCAL_HIT, 0.0)
                found = Arrived(int(after.external - before.external), int(cached))
                if found.all >= due:
                    return found
            if time.monotonic() >= end:
                return None if after is None else found
            await asyncio.sleep(self.options.poll)

    async def usage(self) -> Usage:
        """Return how much KV the engines hold with nobody using them.

        Raises:
            NotJudgedError: somebody does, or they don't say.
        """
        end = time.monotonic() + self.options.settle
        while True:
            prefill, decode = await asyncio.gather(self.scraped(self.prefill.url), self.scraped(self.decode.url))
            if prefill is None or decode is None:
                raise NotJudgedError("the engines' /metrics can't be read")
            if not prefill.busy and not decode.busy:
                return Usage(prefill.kv_usage, decode.kv_usage, prefill.expired)
            if time.monotonic() >= end:
                raise NotJudgedError(
                    "requests are on the engines, somebody else's or those of a failed check: their KV comes and goes"
                )
            await asyncio.sleep(self.options.poll)

    async def given_back(self, before: Usage) -> str:
        """Wait until the proxy has nothing under way and both engines hold no more KV than before. Return how that went.

        Raises:
            FailedError: they still do, or P was only freed by the end of a lease.
        """
        self.doing = "KV to be given back"
        begun = time.monotonic()
        deadlines = self.settings.deadlines
        patience = deadlines.abandoned_prefill + deadlines.release
        while busy := self.stand.busy():
            if time.monotonic() - begun > patience:
                raise FailedError(f"the proxy is not done with it after {patience:g} s: {', '.join(busy)}")
            await asyncio.sleep(self.options.poll)
        end = time.monotonic() + self.options.settle
        back: float | None = None
        while True:
            prefill, decode = await asyncio.gather(self.scraped(self.prefill.url), self.scraped(self.decode.url))
            now = time.monotonic()
            if prefill is not None and decode is not None:
                if prefill.expired > before.expired:
                    raise FailedError("P's KV was freed by the end of its lease, and by nobody before")
                held = [
                    f"{who} still holds KV ({is_:.3%} of its memory, {was:.3%} before)"
                    for who, is_, was in (
                        ("P", prefill.kv_usage, before.prefill),
                        ("D", decode.kv_usage, before.decode),
                    )
                    if is_ > was + _NOTHING
                ]
                back = None if held else back or now
                if back is not None and now - back >= self.options.steady:
                    return f"KV usage of both was back {back - begun:.1f} s later"
            else:
                held, back = ["the engines' /metrics can't be read any more"], None
            if back is None and now >= end:
                raise FailedError(f"{' and '.join(held)} {now - begun:.1f} s later")
            await asyncio.sleep(self.options.poll)
