"""Who looks on while a proxy works: what an instrument of `lab` puts into one when it is built. Serving needs none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdproxy.observe.events import Observer
from pdproxy.upstream.client import EngineClient


@dataclass(frozen=True, slots=True)
class Watch:
    """`observers` hear all events, behind the proxy's own; `client` makes the engines' clients, and may note what they send."""

    observers: Sequence[Observer] = ()
    client: Callable[..., EngineClient] = EngineClient


UNWATCHED = Watch()
