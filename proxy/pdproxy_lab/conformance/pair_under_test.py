"""What checks work with: a proxy in front of one pair of engines, the same engines without it, and
their own counters.

Owns how a prompt is sent through the pair and what is recorded about it. The checks decide whether
that is right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdproxy.check.engines import NoAnswer, scrape
from pdproxy.check.facts import EngineFacts
from pdproxy.check.http_client import HttpClient
from pdproxy.check.metrics import EngineMetrics
from pdproxy.fleet.audit import LOCAL_HIT
from pdproxy.observe.events import LegFailed, RequestEnded
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract, no_notices
from pdproxy.wire.route_form import Alone
from pdproxy_lab.conformance import requests
from pdproxy_lab.conformance.answers import SeenAnswer
from pdproxy_lab.conformance.api_client import ApiClient, Endpoint
from pdproxy_lab.conformance.options import ConformanceOptions
from pdproxy_lab.conformance.requests import Request, Shape
from pdproxy_lab.conformance.results import FailedError, NotJudgedError
from pdproxy_lab.conformance.stand import Stand

_EPSILON = 1e-9
MAX_PROMPTS = 6
"""Prompts that are tried if the first token of one can't be handed over."""


class ReceivedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that a decode engine counted as transferred, and as found in its own cache."""

    moved: int
    cached: int

    @property
    def all(self) -> int:
        """Tokens that it did not compute."""
        return self.moved + self.cached


class SplitRequest(msgspec.Struct, frozen=True):
    """A request that went through the proxy. `arrived` None: D was not asked, or its counters can't
    be read.
    """

    request: Request
    answer: SeenAnswer
    ended: RequestEnded
    arrived: ReceivedTokens | None
    asked_decode: bool
    since: int
    """The place in the tap's log where it begins."""


class KvUsage(msgspec.Struct, frozen=True):
    """The KV that both engines hold, as shares of their memory, and the number of leases that have
    expired at P.
    """

    prefill: float
    decode: float
    expired: float


@dataclass
class PairUnderTest:
    """One pair of engines. `mark` returns a new text at each call."""

    stand: Stand
    prefill: EngineFacts
    decode: EngineFacts
    settings: Settings
    options: ConformanceOptions
    client: ApiClient
    http: HttpClient
    at: Callable[[str], Endpoint]
    """Returns the endpoint of an engine by its URL."""
    mark: Callable[[], str]
    model: str = ""
    activity: str = ""
    """What is waited for now, for the report of a check that does not end."""

    @property
    def contract(self) -> Contract:
        """The contract that is tested."""
        return self.stand.proxy.transfer.contract

    @property
    def has_notices(self) -> bool:
        """Whether engines send notices that KV is ready."""
        return self.contract.notices is not no_notices

    @property
    def able_alone(self) -> tuple[str, str] | None:
        """The engine of the pair that may answer alone, by its URL and its name in reports, None if
        neither may.

        Engines of some connectors die of a request that the other one takes no part in, or answer
        it wrongly.
        """
        roles = self.contract.capabilities.alone_on
        if Role.DECODE.value in roles:
            return self.decode.url, "D alone"
        return (self.prefill.url, "P alone") if Role.PREFILL.value in roles else None

    @property
    def transfer_unit(self) -> int:
        """The number of tokens that move as one unit, at least."""
        block = self.decode.block_size or 1
        return max(block, self.settings.pool.lmcache.chunk_size) if self.has_notices else block

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that both accept."""
        limits = [
            limit
            for limit in (self.prefill.max_model_len, self.decode.max_model_len)
            if limit is not None
        ]
        return min(limits, default=None)

    # -- requests

    def request(self, shape: Shape, text: Callable[[str], str] | None = None) -> Request:
        """Return a new request. `text` makes its prompt from a mark; None: a prompt whose KV must
        move.
        """
        mark = self.mark()
        prompt = (
            requests.multi_block_text(mark, self.transfer_unit, self.max_model_len)
            if text is None
            else text(mark)
        )
        return requests.make_request(shape, self.model, prompt, mark)

    async def split(
        self, request: Request, stand: Stand | None = None, alone_for: str | None = None
    ) -> SplitRequest:
        """Send a request through the proxy. `alone_for`: a reason for which one engine alone may
        serve it.

        A prompt whose first token can't be handed over (a part of a character) proves nothing:
        another prompt is sent, and the result is about that one.

        Raises:
            FailedError: it was not answered, or not by both engines.
        """
        for _ in range(MAX_PROMPTS):
            split = await self._split(request, stand or self.stand, alone_for)
            if split is not None:
                return split
            request = requests.with_mark(request, self.mark())
        raise NotJudgedError(f"P's first token can't be handed over, of {MAX_PROMPTS} prompts")

    async def _split(
        self, request: Request, stand: Stand, alone_for: str | None
    ) -> SplitRequest | None:
        self.activity = f"a {request.shape.name} through the proxy"
        since, before = stand.tap.mark(), await self.scraped(self.decode.url)
        answer = await self.client.send(Endpoint(stand.url, stand.key), request)
        what = request.shape.name
        if isinstance(answer, NoAnswer):
            raise FailedError(f"a {what} through the proxy: {answer.text}")
        ended = await stand.tap.ended(request.request_id, self.options.settle)
        if ended is None:
            raise FailedError(
                f"a {what} was answered, but has not ended in the proxy {self.options.settle:g} "
                f"s later"
            )
        if any(leg.why_alone == Alone.FIRST_TOKEN.value for leg in ended.legs):
            return None
        for leg in ended.legs:
            if leg.why_alone not in (None, alone_for):
                failures = "; ".join(event.error for event in stand.tap.events(LegFailed, since))
                why = f" ({failures})" if failures else ""
                raise FailedError(f"a {what} was served by one engine alone: {leg.why_alone}{why}")
        asked = bool(stand.tap.legs(since, self.decode.url))
        due = self.due(answer.prompt_tokens)
        arrived = await self.arrived(before, due) if asked else None
        return SplitRequest(request, answer, ended, arrived, asked, since)

    async def alone(self, place: Endpoint, request: Request) -> SeenAnswer:
        """Have an engine answer a request alone.

        Raises:
            NotJudgedError: it does not answer.
        """
        self.activity = f"a {request.shape.name} of {place.url} alone"
        asked = requests.salted(request, self.mark())
        answer = await self.client.send(place, asked)
        if isinstance(answer, NoAnswer):
            raise NotJudgedError(
                f"{place.url}, asked for the same without the proxy: {answer.text}"
            )
        return answer

    # -- counters

    async def scraped(self, url: str) -> EngineMetrics | None:
        """Return an engine's metrics, None if they can't be read."""
        return await scrape(self.http, url)

    def due(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt must not have been computed by D.

        All whole transfer units, except the last one if there are several: some models compute a
        prompt's last tokens again.
        """
        whole = prompt_tokens // self.transfer_unit
        return (whole if whole <= 1 else whole - 1) * self.transfer_unit

    async def arrived(self, before: EngineMetrics | None, due: int) -> ReceivedTokens | None:
        """Return what has arrived at D since a reading, once it is enough or `settle` is over.
        None: not counted.
        """
        if before is None or not before.by_source:
            return None
        end = time.monotonic() + self.options.settle
        while True:
            is_last = time.monotonic() >= end
            after = await self.scraped(self.decode.url)
            if after is not None:
                cached = after.by_source.get(LOCAL_HIT, 0.0) - before.by_source.get(LOCAL_HIT, 0.0)
                found = ReceivedTokens(int(after.external - before.external), int(cached))
                if found.all >= due:
                    return found
            if is_last:
                return None if after is None else found
            await asyncio.sleep(self.options.poll)

    async def usage(self) -> KvUsage:
        """Return how much KV the engines hold without requests.

        Raises:
            NotJudgedError: they have requests, or their metrics can't be read.
        """
        end = time.monotonic() + self.options.settle
        while True:
            is_last = time.monotonic() >= end
            prefill, decode = await asyncio.gather(
                self.scraped(self.prefill.url), self.scraped(self.decode.url)
            )
            if prefill is None or decode is None:
                raise NotJudgedError("the engines' /metrics can't be read")
            if not prefill.busy and not decode.busy:
                return KvUsage(prefill.kv_usage, decode.kv_usage, prefill.expired)
            if is_last:
                raise NotJudgedError(
                    "the engines have requests, from others or from a failed check: their KV "
                    "comes and goes"
                )
            await asyncio.sleep(self.options.poll)

    async def wait_released(self, before: KvUsage) -> str:
        """Wait until the proxy has no work left and both engines hold no more KV than before.
        Return a report of it.

        Raises:
            FailedError: they hold more, or only the end of a lease freed P's KV.
        """
        self.activity = "the release of KV"
        begun = time.monotonic()
        deadlines = self.settings.deadlines
        timeout = deadlines.abandoned_prefill + deadlines.release
        while busy := self.stand.busy():
            if time.monotonic() - begun > timeout:
                raise FailedError(
                    f"the proxy still has work after {timeout:g} s: {', '.join(busy)}"
                )
            await asyncio.sleep(self.options.poll)
        end = time.monotonic() + self.options.settle
        back: float | None = None
        while True:
            is_last = time.monotonic() >= end
            prefill, decode = await asyncio.gather(
                self.scraped(self.prefill.url), self.scraped(self.decode.url)
            )
            now = time.monotonic()
            if prefill is not None and decode is not None:
                # What P held before may be from a failed check, and its lease may end now.
                if prefill.expired > before.expired and before.prefill <= _EPSILON:
                    raise FailedError("P's KV was freed only by the end of its lease")
                held = [
                    f"{who} still holds KV ({is_:.3%} of its memory, {was:.3%} before)"
                    for who, is_, was in (
                        ("P", prefill.kv_usage, before.prefill),
                        ("D", decode.kv_usage, before.decode),
                    )
                    if is_ > was + _EPSILON
                ]
                back = None if held else back or now
                if back is not None and now - back >= self.options.steady:
                    return f"KV usage of both was back after {back - begun:.1f} s"
            else:
                held, back = ["the engines' /metrics can no longer be read"], None
            if back is None and is_last:
                raise FailedError(f"{' and '.join(held)} {now - begun:.1f} s later")
            await asyncio.sleep(self.options.poll)
