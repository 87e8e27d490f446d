"""What engines need to go on with other engines' streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.dispatch.detokenizing import Detokenizing
from pdproxy.serving.dispatch.record import Records
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin


@dataclass(frozen=True, slots=True)
class Continuing:
    """The parts that continue streams."""

    records: Records
    detokenizing: Detokenizing
    is_alive: Callable[[str], Awaitable[bool]]


def build_continuing(
    settings: Settings,
    engines: EngineRegistry,
    admin: EngineAdmin,
    observers: Observers,
    clock: Clock,
    *,
    own_keys: bool,
) -> Continuing | None:
    """Return what continues streams, None if `limits.continuations` is 0.

    `own_keys`: clients send keys of the proxy, so engines are asked with the proxy's key.
    """
    if not settings.limits.continuations:
        return None

    async def ask(url: str, model: str | None, ids: Sequence[int], authorization: bytes | None) -> str:
        # As on the data path: without keys of clients, their own header is forwarded.
        own = None if own_keys else (authorization or b"").decode("latin-1")
        return await admin.text_of(url, model, ids, authorization=own)

    async def is_alive(url: str) -> bool:
        return await admin.answers(url, "/health")

    wanted = settings.continuations
    return Continuing(
        Records(sampled=wanted.sampled, max_bytes=wanted.max_bytes),
        Detokenizing(ask, engines, observers, clock, deadline=settings.deadlines.tokenize),
        is_alive,
    )
