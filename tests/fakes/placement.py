"""A placement that a test decides for, and worlds whose pool has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from pdproxy.observe.weighed import Weighed
from pdproxy.scheduling import placements
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.placement import Candidates, Placed, Placement
from pdproxy.scheduling.placements import PlacementContext
from pdproxy.scheduling.policy import Ask
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes.several import SCRIPTED
from tests.fakes.world import World, world

NAME = SCRIPTED
Choice = Callable[[Ask, Candidates], Placed | None]


def whole(index: int = 0, reason: str = "test", weighed: Weighed | None = None) -> Choice:
    """The engine at an index of those that may serve whole, in the order of the settings."""
    return lambda ask, among: Placed((among.whole[index % len(among.whole)],), reason, weighed)


def split(
    prefill: int = 0, decode: int = 0, reason: str = "test", weighed: Weighed | None = None
) -> Choice:
    """A prefill engine by its index, and one of the decode engines that may work with it."""

    def choose(ask: Ask, among: Candidates) -> Placed | None:
        if not among.prefill or not among.decode:
            return whole(reason="only")(ask, among)
        first = among.prefill[prefill % len(among.prefill)]
        decodes = [other for other in among.decode if among.compatible(first, other)]
        return Placed((first, decodes[decode % len(decodes)]), reason, weighed)

    return choose


def late(_ask: Ask, _among: Candidates) -> Placed | None:
    """None of them."""
    return None


class Scripted(Placement):
    """Decides by `choices`, one after the other, and then by `usual`. Keeps what it was asked and
    told.
    """

    def __init__(self, context: PlacementContext) -> None:
        self.context = context
        self.usual: Choice = split()
        self.choices: deque[Choice] = deque()
        self.asks: list[Ask] = []
        self.candidates: list[Candidates] = []
        self.told: list[tuple[Any, ...]] = []
        self.says: str | None = None

    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """See `Placement`."""
        self.asks.append(ask)
        self.candidates.append(candidates)
        return (self.choices.popleft() if self.choices else self.usual)(ask, candidates)

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Placement`."""
        self.told.append(("opened", lease.role.value, lease.engine.url))

    def began(self, lease: Lease, now: float) -> None:
        """See `Placement`."""
        self.told.append(("began", lease.role.value, lease.engine.url))

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """See `Placement`."""
        self.told.append(("closed", lease.role.value, lease.engine.url, verdict.value, tokens))

    def status(self, now: float) -> str | None:
        """See `Placement`."""
        return self.says

    def of(self, engine: LedgerEngine | str, what: str) -> list[tuple[Any, ...]]:
        """What was told of an engine, of one kind."""
        url = engine if isinstance(engine, str) else engine.url
        return [one for one in self.told if one[0] == what and one[2] == url]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the settings name it."""
    monkeypatch.setattr(placements, "PLACEMENTS", MappingProxyType({NAME: Scripted}))


def placed(
    settings: Settings, pool: Mapping[str, Any] = MappingProxyType({}), **policy: Any
) -> Settings:
    """Settings whose pool has it."""
    replace = msgspec.structs.replace
    chosen = replace(settings.pool, policy=PoolPolicy(placement=NAME, **policy), **pool)
    # Decisions are kept only for the admin API.
    return replace(
        settings, pools=(chosen,), listen=replace(settings.listen, admin="unix:/nowhere")
    )


def placed_world(
    prefill: int = 0,
    decode: int = 0,
    *,
    anything: int = 0,
    policy: Mapping[str, Any] = MappingProxyType({}),
    pool: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> AbstractAsyncContextManager[World]:
    """A world whose pool has it. `policy` and `pool`: further settings."""
    return world(
        prefill,
        decode,
        anything=anything,
        adjust=lambda settings: placed(settings, pool, **policy),
        **more,
    )


def scripted(w: World) -> Scripted:
    """The placement of a world."""
    found = w.proxy.ledger.placement
    assert isinstance(found, Scripted)
    return found
