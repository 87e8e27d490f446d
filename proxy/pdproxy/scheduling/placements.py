"""The placements by their names in the settings. A new one is a module beside this one, and an
entry in `PLACEMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pdproxy.engine_model.fitted import FittedRanges
from pdproxy.engine_model.hardware import Hardware
from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.replica import ReplicaAuto
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.placement import Placement
from pdproxy.scheduling.policy import Cached, no_chance
from pdproxy.scheduling.slo import NO_SLO, Slo

AUTO = "auto"
SPLIT = "split"
"""`pools[].policy.placement`: no placement. A prompt is split if it can be, and the policies of the
roles choose.
"""


def _no_hardware(_url: str) -> Hardware | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementContext:
    """What a placement is made of. `slo`: the pool's objective; a request's own (`Ask.slo`)
    overrides its bounds.

    `refuse_late`: whether a request is refused that no engine can serve within its objective.
    `hardware(url)`: how long an engine's work takes by its profile, None where it has none.
    `chunk(url)`: the most tokens of a step of that engine, by its profile, None as before.
    `fitted(url)`: what that profile was fitted to, None where nobody says. `cached`, `chance`: as
    in `PolicyContext`. `replicas`: how many proxies the engines have, None
    if this is the only one.
    """

    slo: Slo = NO_SLO
    refuse_late: bool = False
    hardware: Callable[[str], Hardware | None] = _no_hardware
    chunk: Callable[[str], int | None] = lambda _: None
    fitted: Callable[[str], FittedRanges | None] = lambda _: None
    cached: Cached | None = None
    replicas: int | None = None
    chance: Callable[[], float] = no_chance


PlacementFactory = Callable[[PlacementContext], Placement]

GENERIC = Hardware()
"""What an engine is taken to be that has no profile, until it was measured."""
_GENERIC_CHUNK = 8192
"""vLLM's default on large accelerators."""


def auto(context: PlacementContext) -> Placement:
    """Return the placement `auto`."""

    def times_of(engine: LedgerEngine) -> tuple[Hardware, int]:
        return context.hardware(engine.url) or GENERIC, context.chunk(engine.url) or _GENERIC_CHUNK

    options = AutoOptions(
        times_of=times_of,
        slo=context.slo,
        cached=context.cached,
        assumed=lambda engine: context.hardware(engine.url) is None,
        fitted=lambda engine: context.fitted(engine.url),
        refuses=context.refuse_late,
    )
    if context.replicas is None:
        return Auto(options)
    return ReplicaAuto(options, replicas=context.replicas, chance=context.chance)


PLACEMENTS: Mapping[str, PlacementFactory] = MappingProxyType({AUTO: auto})
"""What `pools[].policy.placement` may be, besides `split`."""


ASK_THE_INDEX = frozenset({AUTO})
"""Those that ask what engines have in their caches, as in `policies`."""


def names() -> tuple[str, ...]:
    """Return what `pools[].policy.placement` can be."""
    return (SPLIT, *PLACEMENTS)
