"""All runs of one measurement: each server with each seed, in turn. Owns the first questions to a
server, and an orderly end.

Servers are measured alternately, so that a slow change of the machine meets all of them. A server's
prompts differ from another's in their tokens and agree in their lengths and times: two proxies
before the same engines don't find each other's prompts cached.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from pdproxy_lab.bench.client import Run, RunProgress, Target, session_of
from pdproxy_lab.bench.decision import ASKED
from pdproxy_lab.bench.errors import USAGE_ERROR, BenchError
from pdproxy_lab.bench.measures import summarise
from pdproxy_lab.bench.outcome import Observed
from pdproxy_lab.bench.prompts import ONE_EACH, Endpoint, Prompts, WordTokens, word_tokens
from pdproxy_lab.bench.reading import Address
from pdproxy_lab.bench.record import Record, Shape, detailed, record_of
from pdproxy_lab.bench.slo import BenchSlo, slo_headers
from pdproxy_lab.bench.sweep import Sweep, span
from pdproxy_lab.bench.workload import Lengths, Planned

MAX_IN_FLIGHT = 4096
"""Requests of one run, unless the option says otherwise or the system allows fewer files."""
_OTHER_FILES = 64
_ASK = 10.0
"""Seconds for the list of models."""
_MAX_MODELS = 1 << 20
"""Bytes of that list."""
_WARM_UP_GAP = 0.05
_PROGRESS = 0.5
"""Seconds between two reports of the progress."""


class Load(msgspec.Struct, frozen=True):
    """`plan` returns the requests of a seed, `shape` describes them without seed and number."""

    plan: Callable[[int], list[Planned]]
    shape: Shape


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    servers: tuple[Address, ...]
    seeds: range
    loads: tuple[Load, ...]
    """One; of a sweep, one per rate, the lowest first."""
    endpoint: Endpoint
    sweep_seconds: float | None = None
    """What all runs of a sweep may take; None: it is no sweep."""
    slos: tuple[BenchSlo, ...] = ()
    model: str | None = None
    """None: the first one that the server lists."""
    headers: Mapping[str, str] = {}
    """Of each request, by their names in lower case."""
    timeout: float = 300.0
    """Seconds that each request may take."""
    max_in_flight: int | None = None
    allow_lag: bool = False
    ids: Lengths = Lengths(300, 4000)
    extra: Mapping[str, Any] = {}
    send_slo: bool = False
    """Whether each request tells its server the SLO of its class, or else the first one for all."""
    session_header: str | None = None
    """The header that names a request's conversation. None: none is sent."""
    warm_up: int = 1
    """Requests to each server before its first run."""
    detailed: bool = False
    tls: ssl.SSLContext | None = None
    version: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a measurement is. `run` of `runs`, from 1 on, against a server with a seed."""

    run: int
    runs: int
    name: str
    seed: int
    rate: float | None
    left: float
    """Seconds in which the requests of this run and of the others still come, if these take as
    long.
    """
    seen: RunProgress


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class BenchSession:
    """Measures. `on_record` gets each run's record when it ends, `on_progress` twice per second how
    far it is.
    """

    def __init__(
        self,
        options: BenchOptions,
        on_record: Callable[[Record], None],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._options = options
        self._on_record = on_record
        self._on_progress = on_progress
        self._run: Run | None = None
        self._begun = 0
        """Runs that have begun, or were left out."""
        self._asking: asyncio.Task[None] | None = None
        self._words: dict[str, WordTokens] = {}
        """By a server's name, for chats."""
        self.sweep: Sweep | None = None
        self.stopped = False

    def stop(self) -> None:
        """End it now. The run that goes on is recorded as partial, and no further one begins."""
        self.stopped = True
        if self._run is not None:
            self._run.stop()
        elif self._asking is not None:
            self._asking.cancel()

    async def measure(self) -> None:
        """Measure all servers with all seeds.

        Raises:
            BenchError: a server can't be asked, or its first answers are wrong.
        """
        most = in_flight_limit(self._options.max_in_flight)
        async with session_of(self._options.tls) as session:
            self._asking = asyncio.create_task(self._prepare(session))
            await asyncio.wait([self._asking])
            if self.stopped or self._asking.cancelled():
                return
            self._asking.result()
            gc.collect()
            gc.freeze()  # what is there by now need not be searched while times are taken
            try:
                if (seconds := self._options.sweep_seconds) is not None:
                    self.sweep = Sweep(seconds)
                for load, seed in itertools.product(self._options.loads, self._options.seeds):
                    planned = load.plan(seed)
                    for target in self._targets:
                        if not self.stopped:
                            await self._one(session, target, load.shape, seed, planned, most)
            finally:
                gc.unfreeze()

    async def _prepare(self, session: aiohttp.ClientSession) -> None:
        options = self._options
        self._targets = []
        for server in options.servers:
            model = options.model or await _first_model(session, server, options)
            headers = {**ASKED, **options.headers}
            target = Target(name=server.name, url=server.url, model=model, headers=headers)
            self._targets.append(target)
            first = options.loads[0].plan(options.seeds.start)[:1]
            planned = (
                [
                    msgspec.structs.replace(first[0], at=i * _WARM_UP_GAP)
                    for i in range(options.warm_up)
                ]
                if first
                else []
            )
            run = self._run_of(session, target, options.loads[0].shape, "warm-up", MAX_IN_FLIGHT)
            for outcome in (await run.go(planned)).outcomes:
                if outcome.error is not None:
                    raise BenchError(
                        f"{server.name}: the first request failed: {outcome.error}: {outcome.text}"
                    )
            if options.endpoint == "chat" and planned:
                await self._count_words(session, target)

    async def _count_words(self, session: aiohttp.ClientSession, target: Target) -> None:
        """Find how many tokens words have, by two chats. Without the server's count of them: one
        each.
        """
        options = self._options
        prompts = Prompts(options.endpoint, target.model, "", options.ids, dict(options.extra))
        run = Run(
            session,
            target,
            options.endpoint,
            prompts.listing,
            timeout=options.timeout,
            max_in_flight=2,
        )
        seen = await run.go([Planned(0.0, 1, 1), Planned(_WARM_UP_GAP, 1, 1)])
        known = [
            outcome.prompt_tokens for outcome in seen.outcomes if outcome.prompt_tokens is not None
        ]
        if len(known) == 2:
            self._words[target.name] = word_tokens(*known)

    def _run_of(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        shape: Shape,
        seed: object,
        most: int,
    ) -> Run:
        options = self._options
        # another rate is another run: its prompts must not be in the caches
        rate = f":{shape.rate}" if self.sweep is not None else ""
        salt = f"{shape.salt}:{target.name}:{seed}{rate}"
        words = self._words.get(target.name, ONE_EACH)
        prompts = Prompts(
            options.endpoint, target.model, salt, options.ids, dict(options.extra), words
        )
        return Run(
            session,
            target,
            options.endpoint,
            prompts.body,
            timeout=options.timeout,
            max_in_flight=most,
            headers=self._headers_of(prompts),
        )

    def _headers_of(self, prompts: Prompts) -> Callable[[int, Planned], Mapping[str, str]]:
        """Return what makes the headers that only one request has."""
        options = self._options
        slos = reversed(options.slos if options.send_slo else ())
        limits = {slo.of: slo_headers(slo) for slo in slos}
        header = options.session_header

        def headers(index: int, planned: Planned) -> Mapping[str, str]:
            known = limits.get(planned.class_name) or limits.get(None) or {}
            if header is None:
                return known
            return {**known, header: prompts.conversation(index, planned)}

        return headers

    async def _one(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        shape: Shape,
        seed: int,
        planned: Sequence[Planned],
        most: int,
    ) -> None:
        options, sweep = self._options, self.sweep
        self._begun += 1
        refusal = sweep.refusal(target.name, planned) if sweep is not None else ""
        if refusal:
            seen = Observed(outcomes=[], loop_lags=[], seconds=0.0, given_up=refusal)
        else:
            self._run = run = self._run_of(session, target, shape, seed, most)
            async with self._reporting(run, target, shape, seed, span(planned)):
                seen = await run.go(planned, None if sweep is None else sweep.limit(planned))
            self._run = None
        if sweep is not None and not refusal:
            sweep.note(target.name, shape.rate, planned, seen)
        summary = summarise(seen, options.slos, allow_lag=options.allow_lag)
        shape = msgspec.structs.replace(shape, seed=seed, requests=len(planned))
        record = record_of(summary, target, shape, options.slos, options.version)
        self._on_record(detailed(record, seen) if options.detailed else record)

    @asynccontextmanager
    async def _reporting(
        self, run: Run, target: Target, shape: Shape, seed: int, seconds: float
    ) -> AsyncIterator[None]:
        options = self._options
        runs = len(options.loads) * len(options.seeds) * len(self._targets)

        async def report() -> None:
            while self._on_progress is not None:
                seen = run.progress()
                rest = max(seconds - seen["seconds"], 0.0)
                self._on_progress(
                    Progress(
                        run=self._begun,
                        runs=runs,
                        name=target.name,
                        seed=seed,
                        rate=shape.rate,
                        left=rest + (runs - self._begun) * seconds,
                        seen=seen,
                    )
                )
                await asyncio.sleep(_PROGRESS)

        task = asyncio.create_task(report())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def in_flight_limit(wanted: int | None) -> int:
    """Return how many requests may be in flight, and let the process have as many files.

    Raises:
        BenchError: the system doesn't allow that many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (wanted or MAX_IN_FLIGHT) + _OTHER_FILES
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if wanted is not None and allowed < needed:
        raise BenchError(
            f"--max-in-flight: {wanted} need {needed} open files, the system allows {hard}",
            USAGE_ERROR,
        )
    return allowed - _OTHER_FILES


async def _first_model(
    session: aiohttp.ClientSession, server: Address, options: BenchOptions
) -> str:
    url = server.url + "/v1/models"
    try:
        async with (
            asyncio.timeout(min(options.timeout, _ASK)),
            session.get(
                url,
                headers={**options.headers, "accept-encoding": "identity"},
                allow_redirects=False,
            ) as answer,
        ):
            content = b""
            async for chunk in answer.content.iter_any():
                content += chunk
                if len(content) > _MAX_MODELS:
                    raise BenchError(
                        f"{server.name}: {url}: the answer is longer than {_MAX_MODELS} bytes"
                    )
            if answer.status != 200:
                raise BenchError(
                    f"{server.name}: {url}: status {answer.status} (--api-key, --header or --model)"
                )
    except TimeoutError:
        raise BenchError(
            f"{server.name}: {url}: no answer within {min(options.timeout, _ASK):g} s"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BenchError(f"{server.name}: {url}: {error or type(error).__name__}") from None
    try:
        models = msgspec.json.decode(content, type=_Models).data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BenchError(
            f"{server.name}: {url}: the answer is no list of models (--model)"
        ) from None
    if not models or not 0 < len(models[0].id) <= 256:
        raise BenchError(f"{server.name}: {url}: it lists no model (--model)")
    return models[0].id
