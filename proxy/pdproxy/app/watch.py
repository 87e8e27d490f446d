"""How an instrument of `lab` observes a proxy: given when the proxy is built. Serving needs none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdproxy.observe.events import Observer
from pdproxy.upstream.client import EngineClient


@dataclass(frozen=True, slots=True)
class Watch:
    """`observers` get all events, after the proxy's own; `client` makes the engines' clients, and may record what they send."""

    observers: Sequence[Observer] = ()
    client: Callable[..., EngineClient] = EngineClient


UNWATCHED = Watch()
