"""What engines make of a chat's request and of its token ids: `/v1/chat/completions/render` and
`derender`.

Only engines that run with `--enable-scale-out` and a parser have a use here. The prober asks each
of them once per run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import Wait
from pdproxy.observe.events import DeadlinePassed, Event, NodeChanged, Observers
from pdproxy.serving.dispatch.in_turn import AskedFor, first_answer
from pdproxy.settings.limits import Deadlines

Ask = Callable[[str, str, bytes, bytes | None, int], Awaitable[bytes]]
"""Sends an engine (its URL), on a path, a body with the client's `Authorization`; returns its
answer of so many bytes at most.
"""
_MAX_CALLS = 64
"""Calls under way at a time. The others wait for them, and no probe waits for a connection: there
are 100.
"""
_MAX_MODELS = 1024


class Derendering:
    """Asks engines, and knows which models' engines all can. `deadlines`: that of one answer,
    whatever fails meanwhile.

    `most`: tokens of a prompt and its answer together, so that no engine parses for long. An
    observer.
    """

    only = (NodeChanged,)

    def __init__(
        self,
        ask: Ask,
        engines: EngineRegistry,
        observers: Observers,
        clock: Clock,
        *,
        deadlines: Deadlines,
        most: int,
    ) -> None:
        self._ask = ask
        self._engines = engines
        self._observers = observers
        self._clock = clock
        self._deadlines = deadlines
        self._possible: dict[str | None, bool] = {}
        self._places = asyncio.Semaphore(_MAX_CALLS)
        self.most = most

    def __repr__(self) -> str:
        return f"<Derendering within {self._deadlines.between_tokens:g} s>"

    def notify(self, event: Event) -> None:
        """Look again when an engine has changed."""
        if isinstance(event, NodeChanged):
            self._possible.clear()

    def possible(self, model: str | None) -> bool:
        """Return whether all engines of a model that are up can parse what their chats' parsers
        do.
        """
        found = self._possible.get(model)
        if found is None:
            evidences = [
                engine.in_ledger.evidence
                for engine in self._engines.values()
                if engine.in_ledger.up
                and engine.in_ledger.evidence is not None
                and (model is None or engine.in_ledger.serves(model))
            ]
            found = bool(evidences) and all(evidence.derenders for evidence in evidences)
            if len(self._possible) >= _MAX_MODELS:  # clients choose these names
                self._possible.clear()
            if evidences:
                self._possible[model] = found
        return found

    async def answer(
        self,
        path: str,
        model: str | None,
        body: bytes,
        authorization: bytes | None,
        *,
        without: str,
        max_bytes: int,
        asked_for: AskedFor,
    ) -> bytes | None:
        """Return an engine's answer, None if none has answered in time. `without`: the URL of an
        engine that is asked last.
        """
        now = self._clock.now()
        able = [
            engine.in_ledger
            for engine in self._engines.values()
            if engine.in_ledger.usable(now)
            and engine.in_ledger.evidence is not None
            and engine.in_ledger.evidence.derenders
            and (model is None or engine.in_ledger.serves(model))
        ]
        asked = sorted(able, key=lambda one: (one.url == without, one.requests))
        try:
            with self._clock.within(self._deadlines.between_tokens):
                async with self._places:
                    return await first_answer(
                        asked,
                        lambda ledger_engine: self._ask(
                            ledger_engine.url, path, body, authorization, max_bytes
                        ),
                        self._clock,
                        self._deadlines.between_tokens,
                        Wait.BETWEEN_TOKENS,
                        self._observers,
                        asked_for,
                    )
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.BETWEEN_TOKENS.value))
            return None
