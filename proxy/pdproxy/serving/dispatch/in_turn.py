"""One question to several engines, one after the other, until one answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, OverloadedError, Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.losses import Fingerprint, Losses, RequestAtRisk
from pdproxy.serving.dispatch.broken_legs import broke

MOST = 2
"""Engines that are asked one question."""

Answer = TypeVar("Answer")


class AskedFor(msgspec.Struct, eq=False):
    """The request that a question is for: engines that disappear under the question are lost under
    the request.

    `fingerprint`: the request's, None if it is not known. `engine`: the URL of the engine that
    makes the rest of its answer, None before there is one.
    """

    lost: Losses
    sender: RequestAtRisk
    fingerprint: Fingerprint | None
    engine: str | None = None

    async def may_ask(self, engines: Sequence[LedgerEngine]) -> Sequence[LedgerEngine]:
        """Return which engines may be asked. Behind a lost one it is one: the one that has the
        request, if there is any.
        """
        forbidden = await self.lost.forbidden(self.sender) if self.sender.lost else ()
        found = [ledger_engine for ledger_engine in engines if ledger_engine.url not in forbidden]
        if any(one.some for one in self.sender.lost):
            return sorted(found, key=lambda ledger_engine: ledger_engine.url != self.engine)[:1]
        return found[:MOST]

    def broke(self, ledger_engine: LedgerEngine, error: EngineError, since: float) -> None:
        """Note an engine that has failed. `since`: when it was asked."""
        broke(self.lost, self.sender, ledger_engine, error, since, streamed=False)

    async def may_go_on(self) -> bool:
        """Find out which engines are lost. Return whether one more may be asked."""
        return not self.sender.lost or await self.lost.judge(self.sender, self.fingerprint) is None


async def first_answer(
    engines: Sequence[LedgerEngine],
    ask: Callable[[LedgerEngine], Awaitable[Answer]],
    clock: Clock,
    seconds: float,
    wait: Wait,
    observers: Observers,
    asked_for: AskedFor,
) -> Answer | None:
    """Return the first answer, None if none of the first engines gives one in time. Each has an
    equal part of the time.

    Behind an engine that has disappeared, one more is asked at most, and not the last one of a
    role.
    """
    asked = await asked_for.may_ask(engines)
    for ledger_engine in asked:
        if ledger_engine not in await asked_for.may_ask([ledger_engine]):  # the one before was lost
            continue
        since = clock.now()
        try:
            with clock.within(seconds / len(asked)):
                return await ask(ledger_engine)
        except EngineError as error:
            asked_for.broke(ledger_engine, error, since)
        except OverloadedError:
            continue
        except TimeoutError:
            observers.notify(DeadlinePassed(wait.value))
        if not await asked_for.may_go_on():
            return None
    return None
