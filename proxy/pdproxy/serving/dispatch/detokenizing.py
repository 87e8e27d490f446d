"""The text of token ids, by an engine's `/detokenize`: only where a stream was cut, to see what its
client has of the text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import Wait
from pdproxy.observe.events import Observers
from pdproxy.serving.dispatch.in_turn import AskedFor, first_answer
from pdproxy.settings.limits import Deadlines

AskForText = Callable[[str, str | None, Sequence[int], bytes | None], Awaitable[str]]
"""Sends an engine (its URL) a model's name and ids, with the client's own `Authorization`; returns
their text.
"""


class Detokenizing:
    """Asks for texts. `deadlines`: has the deadline of one text, whatever fails meanwhile."""

    def __init__(
        self,
        ask: AskForText,
        engines: EngineRegistry,
        observers: Observers,
        clock: Clock,
        *,
        deadlines: Deadlines,
    ) -> None:
        self._ask = ask
        self._engines = engines
        self._observers = observers
        self._clock = clock
        self._deadlines = deadlines

    def __repr__(self) -> str:
        return f"<Detokenizing within {self._deadlines.tokenize:g} s>"

    async def text(
        self,
        model: str | None,
        ids: Sequence[int],
        authorization: bytes | None,
        *,
        without: str,
        asked_for: AskedFor,
    ) -> str | None:
        """Return the text of ids, None if no engine has answered in time. `without`: the URL of an
        engine that is not asked.
        """
        now = self._clock.now()
        engines = [engine.in_ledger for engine in self._engines.values()]
        able = [
            ledger_engine
            for ledger_engine in engines
            if ledger_engine.usable(now) and (model is None or ledger_engine.serves(model))
        ]
        able = [ledger_engine for ledger_engine in able if ledger_engine.url != without] or able
        return await first_answer(
            sorted(able, key=lambda one: one.requests),
            lambda ledger_engine: self._ask(ledger_engine.url, model, ids, authorization),
            self._clock,
            self._deadlines.tokenize,
            Wait.TOKENIZE,
            self._observers,
            asked_for,
        )
