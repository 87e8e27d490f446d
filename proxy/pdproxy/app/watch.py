"""How a tool or a test observes a proxy in its process: given when the proxy is built. Serving
needs none of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from pdproxy.observe.events import Observer
from pdproxy.upstream.client import EngineClient


@dataclass(frozen=True, slots=True)
class Watch:
    """`observers` get all events, after the proxy's own; `client`: the class of engines' clients,
    which may note what they send.

    `connector` makes the connectors of aiohttp's sessions, inside the event loop; None: aiohttp's
    own. `now`: seconds of a steady clock, for durations. `chance`: draws for choices among engines.
    """

    observers: Sequence[Observer] = ()
    client: type[EngineClient] = EngineClient
    connector: Callable[[], aiohttp.BaseConnector] | None = None
    now: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random


UNWATCHED = Watch()
