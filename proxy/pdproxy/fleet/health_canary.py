"""Asks one engine whether its cores work: by a completion of one token, and by whether its metrics
move.

`/health` answers while a core stands still. A completion needs the core, and only the core's own
reports change the metrics that are read here. Both are asked beside each other: a busy core may
take long for the completion, and one that computes one long step moves no metric.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.kit.errors import EngineError, EngineRefusedError, EngineTimeoutError, OverloadedError
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.health import Health
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.metrics_page import Scrape
from pdproxy.wire.engine import prefill_answer

_PATH = "/v1/completions"
_IDS = 4
"""Token ids of the prompt: fewer than any KV block has, so that no cache and no connector keeps
anything of it.
"""


class HealthCanary:
    """Asks engines for one token. `roles`: engines of which roles may be asked; `health`: how long
    each answer may take.
    """

    def __init__(
        self, admin: EngineAdmin, observers: Observers, roles: Collection[str], health: Health
    ) -> None:
        self._admin = admin
        self._observers = observers
        self._roles = roles
        self._health = health

    def may_ask(self, engine: Engine) -> bool:
        """Return whether an engine may be asked: its role allows it, and a model of it is known."""
        evidence = engine.in_ledger.evidence
        return (
            engine.in_ledger.role.value in self._roles
            and evidence is not None
            and bool(evidence.models)
        )

    async def works(self, engine: Engine, rank: int | None) -> bool | None:
        """Return whether an engine has answered with a token, None if it refuses such requests, or
        has no place for one now.

        `rank`: the data-parallel one that is to serve it, None: any.
        """
        evidence = engine.in_ledger.evidence
        assert evidence is not None
        model = min(evidence.models - evidence.adapters or evidence.models)
        ids = next((ids for ids in evidence.canary if ids), (1,))[:_IDS]
        body = msgspec.json.encode(
            {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        )
        engine.open_legs.canaries += 1
        try:
            answer = await self._admin.canary(
                engine.url, _PATH, body, rank, timeout=self._health.canary_timeout
            )
        except EngineRefusedError as error:
            return None if error.status < 500 or error.status == 503 else False
        except EngineTimeoutError as error:
            self._observers.notify(DeadlinePassed(error.wait.value, engine.url))
            return False
        except EngineError:
            return False
        except OverloadedError:
            return None
        finally:
            engine.open_legs.canaries -= 1
        found = prefill_answer(answer)
        return found is not None and bool(found.choices)


class Enquiry:
    """What was asked of one engine since `began`, and which signs it has shown since. Close it.

    Nothing is asked twice at once. `spawn` runs a task; `results` counts the canaries by their
    result.
    """

    def __init__(
        self,
        engine: Engine,
        canary: HealthCanary,
        scrape: Callable[[str], Awaitable[Scrape]],
        spawn: Callable[[Coroutine[object, object, None], str], asyncio.Task[None]],
        now: Callable[[], float],
        results: Counter[str],
    ) -> None:
        self._engine = engine
        self._canary = canary
        self._scrape = scrape
        self._spawn = spawn
        self._now = now
        self._results = results
        self.began = now()
        self._may_ask = canary.may_ask(engine)
        self.refused = not self._may_ask
        """Whether the engine can't be asked for a token, or refuses that."""
        self._signs: dict[int, float] = {}
        """By rank: when it has shown its last sign."""
        self._any_sign = 0.0
        self._progress: Mapping[str, tuple[float, ...]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Enquiry at {self._engine.url}, {len(self._running)} running>"

    @property
    def shows_progress(self) -> bool:
        """Whether the engine has metrics that move as it works."""
        return bool(self._progress)

    @property
    def last_sign(self) -> float:
        """When the engine has shown last that it works, 0 if it has not: of several ranks, each
        must have.

        If it refuses canaries, the sign of any rank counts: an idle rank shows none by itself.
        """
        ranks = self._engine.ranks
        if ranks == 1 or self.refused:
            return self._any_sign
        return min(self._signs.get(rank, 0.0) for rank in range(ranks))

    def ask(self, *, canary: bool = True, again: bool = False) -> None:
        """Ask for the metrics, and with `canary` for a token of each rank, unless that is being
        asked.

        `again`: also if it has refused that before: its queue may have been full.
        """
        self._start("metrics", self._read_metrics)
        if canary and again:
            self.refused = not self._may_ask
        if canary and not self.refused:
            for rank in range(self._engine.ranks):
                self._start(f"canary {rank}", partial(self._ask_rank, rank))

    def close(self) -> None:
        """Ask no more. Requests that are under way are closed: an engine that goes on aborts
        them.
        """
        for task in self._running.values():
            task.cancel()
        self._running.clear()

    def _start(self, name: str, ask: Callable[[], Coroutine[object, object, None]]) -> None:
        known = self._running.get(name)
        if known is None or known.done():
            self._running[name] = self._spawn(ask(), f"{name} of {self._engine.url}")

    async def _ask_rank(self, rank: int) -> None:
        works = await self._canary.works(self._engine, rank if self._engine.ranks > 1 else None)
        if works is None:
            self.refused = True
        elif works:
            self._signs[rank] = self._any_sign = self._now()
        self._results[{None: "refused", True: "answered", False: "failed"}[works]] += 1

    async def _read_metrics(self) -> None:
        try:
            found = (await self._scrape(self._engine.url)).progress
        except (EngineError, OverloadedError):
            return
        before, self._progress = self._progress, found
        for rank, values in found.items():
            if rank in before and before[rank] != values:
                self._any_sign = self._now()
                if rank.isdecimal():
                    self._signs[int(rank)] = self._any_sign
