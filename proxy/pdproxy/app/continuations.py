"""What engines need to go on with other engines' streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.dispatch.derendering import Derendering
from pdproxy.serving.dispatch.detokenizing import Detokenizing
from pdproxy.serving.dispatch.record import ContinuationRecords
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin


@dataclass(frozen=True, slots=True)
class Continuing:
    """The parts that continue streams."""

    records: ContinuationRecords
    detokenizing: Detokenizing
    derendering: Derendering | None


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

    def own(authorization: bytes | None) -> str | None:
        # As on the data path: without keys of clients, their own header is forwarded.
        return None if own_keys else (authorization or b"").decode("latin-1")

    async def ask(
        url: str, model: str | None, ids: Sequence[int], authorization: bytes | None
    ) -> str:
        return await admin.text_of(url, model, ids, authorization=own(authorization))

    async def ask_for(
        url: str, path: str, body: bytes, authorization: bytes | None, max_bytes: int
    ) -> bytes:
        key, timeout = own(authorization), settings.deadlines.between_tokens
        return await admin.ask(
            url, path, body, authorization=key, timeout=timeout, max_bytes=max_bytes
        )

    wanted, deadlines = settings.continuations, settings.deadlines
    derendering = None
    if wanted.parsed == "auto":
        most = wanted.max_parsed_tokens
        derendering = Derendering(
            ask_for, engines, observers, clock, deadlines=deadlines, most=most
        )
        observers.add(derendering)
    return Continuing(
        ContinuationRecords(
            sampled=wanted.sampled,
            max_bytes=wanted.max_bytes,
            derenders=(lambda _: False) if derendering is None else derendering.possible,
        ),
        Detokenizing(ask, engines, observers, clock, deadlines=deadlines),
        derendering,
    )
