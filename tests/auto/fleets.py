"""Hardware, engines and requests of these tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import load
from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import Slo

H200 = load("h200-8b").hardware
B = Slo(ttft=0.5, tpot=0.008)


ENOUGH = 30.0
"""Seconds. What has waited for so long begins in any case."""


class Known:
    """An index of prefixes that says what a test has put in."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def cached(self, ask: Ask) -> Mapping[str, int]:
        return self.tokens


def auto(slo: Slo = B, *, chunk: int = 2048, hardware: Hardware = H200, **options: Any) -> Auto:
    return Auto(AutoOptions(times_of=lambda _: (hardware, chunk), slo=slo, **options))


def ledger(placement: Auto, roles: Iterable[Role]) -> Ledger:
    """Return a ledger with an engine of each of these roles, `http://0:1`, `http://1:1`..., all
    up.
    """
    specs = [EngineSpec(f"http://{number}:1", role) for number, role in enumerate(roles)]
    made = Ledger(
        specs, LedgerOptions(breaker_failures=3, breaker_cooldown=10.0, placement=placement)
    )
    for spec in specs:
        made.mark_up(spec.url, Evidence(frozenset({"m"}), "", 16, (), 0, 1.0))
    return made


def ask(
    now: float,
    tokens: int = 4000,
    *,
    slo: Slo | None = None,
    stream: bool = True,
    waited: float = 0.0,
) -> Ask:
    return Ask("m", 4 * tokens, now, tokens, slo=slo, is_silent=not stream, waited=waited)


def node(url: str = "http://0:1", role: Role = Role.ANY) -> LedgerEngine:
    return LedgerEngine(EngineSpec(url, role))
