"""The legs of an attempt as the watch over engines that stand still sees them (`fleet.stalls`)."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.errors import EngineError
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.decode_start import has_data
from pdproxy.upstream.client import Pending


class OpenPrefillLeg:
    """A prefill leg. It shows nothing before its whole answer. `fail` is what ends it."""

    __slots__ = ("fail", "prompt_bytes", "since")

    must_progress = True
    waits_for = None

    def __init__(self, since: float, prompt_bytes: int, fail: Callable[[EngineError], None]) -> None:
        self.since = since
        self.prompt_bytes = prompt_bytes
        self.fail = fail

    def last_sign(self) -> float:
        """Return that none has come."""
        return 0.0

    def source_lost(self, why: str) -> None:
        """It waits for no KV that its end depends on."""


class OpenAnswer:
    """An answering leg. `end` ends it before its data, and returns whether it has."""

    __slots__ = ("_attempt", "_end", "prompt_bytes", "since")

    def __init__(self, attempt: Attempt, since: float, end: Callable[[EngineError], bool]) -> None:
        self._attempt = attempt
        self._end = end
        self.since = since
        self.prompt_bytes = attempt.assignment.leases[-1].prompt_bytes

    def last_sign(self) -> float:
        """Return when the last data came that went on to the client."""
        relay = self._attempt.relay
        return relay.fast_path.last if relay is not None and relay.fast_path.events else 0.0

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


def failing(pending: Callable[[], Pending | None]) -> Callable[[EngineError], None]:
    """Return what ends a leg whose whole answer is awaited, once it was sent."""

    def fail(error: EngineError) -> None:
        if (sent := pending()) is not None:
            sent.fail(error)

    return fail
