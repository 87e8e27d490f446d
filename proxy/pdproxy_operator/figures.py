"""What the proxies of a PDProxy say together, from their pages of metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdproxy_operator.resources import Role

Moves = Literal["moves", "recomputes", "fails"]


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What the proxies say of the engine of a pod. `known`, `up`: how many of them list it, and how
    many find it up. `requests`: legs in flight there, of all proxies.

    `kv`: whether KV comes to it, or from it; None: no proxy has seen it lately.
    """

    known: int
    up: int
    requests: int
    kv: Moves | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What all proxies of a PDProxy say together.

    `total`: its proxies; `answered`: those that have said something. `engines`: by the name of
    their pod. `demand`: engines that the load needs, by pool and role. `ready`, `degraded`: proxies
    that serve, and those of them that can split no prompt. `refused`: those that could not use
    their settings. `left_out`: what is no engine there, at most at any proxy.
    """

    total: int = 0
    answered: int = 0
    engines: Mapping[str, EngineFigures] = field(default_factory=dict)
    demand: Mapping[tuple[str, Role], float] = field(default_factory=dict)
    ready: int = 0
    degraded: int = 0
    refused: int = 0
    left_out: int = 0
