"""Which broken legs may mean that their engines are lost."""

from __future__ import annotations

from pdproxy.kit.errors import ConnectionLostError, EngineError
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.losses import Losses, RequestAtRisk
from pdproxy.serving.dispatch.failure_class import verdict_of


def broke(
    losses: Losses,
    sender: RequestAtRisk,
    engine: LedgerEngine,
    error: EngineError,
    since: float,
    *,
    streamed: bool,
    beside: bool = False,
) -> bool:
    """Note a leg that has failed. Return whether its engine may be lost.

    `since`: when it was sent; `streamed`: data had come.

    `beside`: the leg was ended only since the one beside it had failed, so that its own engine may
    be lost, too.
    """
    broken = isinstance(error, ConnectionLostError) or verdict_of(error) is Verdict.DEAD
    if not broken and not (beside and sender.lost):
        return False
    return losses.broke(sender, engine, since, streamed=streamed)
