"""The legs of an attempt as the watch over engines that stand still sees them (`fleet.stalls`)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.kit.errors import EngineError
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.decode_start import has_data


class OpenPrefillLeg(msgspec.Struct, eq=False):
    """A prefill leg. It shows nothing before its whole answer. `fail` ends it."""

    since: float
    prompt_bytes: int
    fail: Callable[[EngineError], None]
    stalled_before: int = 0
    must_progress: bool = True
    waits_for: None = None

    def last_sign(self) -> float:
        """Return that none has come."""
        return 0.0

    def source_lost(self, why: str) -> None:
        """It waits for no KV that its end depends on."""


class OpenAnswer(msgspec.Struct, eq=False):
    """An answering leg. `end` ends it before its data, and returns whether it has."""

    _attempt: Attempt
    since: float
    prompt_bytes: int
    _end: Callable[[EngineError], bool]

    def last_sign(self) -> float:
        """Return when the last data came that went on to the client."""
        relay = self._attempt.relay
        return relay.fast_path.last if relay is not None and relay.fast_path.events else 0.0

    @property
    def stalled_before(self) -> int:
        """How many engines have stood still under its request before."""
        return self._attempt.request.stalled

    @property
    def must_progress(self) -> bool:
        """Whether its engine has the KV, and its client reads."""
        relay = self._attempt.relay
        return relay is not None and not relay.paused and (self._attempt.custody is None or has_data(relay))

    @property
    def waits_for(self) -> str | None:
        """The prefill engine of its KV, before its first data."""
        custody, relay = self._attempt.custody, self._attempt.relay
        return None if custody is None or relay is None or has_data(relay) else custody.prefill

    def source_lost(self, why: str) -> None:
        """End it as one whose prefill has failed."""
        custody = self._attempt.custody
        if custody is not None and not custody.awaits_push:  # pushes are looked after by `kv.lost_pushes`
            custody.source_lost(why)

    def fail(self, error: EngineError) -> None:
        """End it, before its first data or in the stream."""
        relay = self._attempt.relay
        if relay is not None and not self._end(error):
            relay.failed(error)
