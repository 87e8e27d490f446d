"""A registry of engines that are never asked anything."""

from __future__ import annotations

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.kit.engine_networks import USUAL
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient

USUAL_HOSTS = HandleHosts(USUAL, lambda _: None)
"""Which hosts handles may name without `engines.networks`, where no engine has settings."""


def unused_client(url: str) -> EngineClient:
    """The client of an engine that nothing is sent to."""
    return EngineClient(url, connect_timeout=1, keepalive=1, clock=Clock(), budget=AnswerBudget())


def registry(*specs: EngineSpec) -> tuple[EngineRegistry, Ledger]:
    """A registry of these engines, and its ledger."""
    ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
    engines = EngineRegistry(ledger)
    for spec in specs:
        engines.add(spec, unused_client(spec.url))
    return engines, ledger
