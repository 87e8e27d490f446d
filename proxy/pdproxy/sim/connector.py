"""What the engine's core asks of a KV connector, in the order in which a request meets it. Pure.

Owns the interface, which follows vLLM's `KVConnectorBase_V1`, and the connector that does nothing. One file a connector:
`nixl`, `lmcache_pd`, `lmcache_mp`, `shared`; `connectors` lists them. What must happen outside of the core (a transfer, a notice
to the proxy) stands in `outbox` as commands; the driver carries them out and reports back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from pdproxy.sim.active import ActiveRequest


class ProxyNotice(msgspec.Struct, frozen=True):
    """Tell the proxy something. Nobody answers."""

    message: dict[str, Any]
    """A msgpack map over ZMQ, a JSON object over HTTP."""
    rank: int = 0
    """The worker that sends it."""


class Connector:
    """One engine's connector. As it stands it moves no KV and ignores all `kv_transfer_params`."""

    counts_all_queries = True
    """Whether vLLM's external queries count all tokens that were not found locally, or those alone that were to come."""

    def __init__(self) -> None:
        self.outbox: deque[Any] = deque()
        """Commands: `Tell`, and each connector's own."""

    @property
    def blocked(self) -> bool:
        """Whether a worker waits for another process, and with it the whole engine."""
        return False

    @property
    def waits_for_step(self) -> bool:
        """Whether something would be sent by a step."""
        return False

    # -- a request before its first step

    def queued(self, one: ActiveRequest) -> None:
        """The scheduler has the request."""

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens beyond `one.computed` come from elsewhere, and whether they come later, by a command.

        What does not come later is there already: `load` will bring it in the same step.
        """
        return 0, False

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """Take note of the blocks for a request that is scheduled for the first time; return whether its KV ever can come.

        Raises:
            EngineDeadError: its parameters kill a real scheduler.
        """
        return True

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Write the KV of `tokens` tokens behind `one.computed` into its blocks, in the step that schedules it.

        Raises:
            EngineDeadError: what was promised is not there.
        """

    # -- its steps

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """A step has computed its KV up to `one.computed`; `first`: it was the request's first one.

        Raises:
            EngineDeadError: saving it kills a real worker.
        """

    # -- its end

    def ended(self, one: ActiveRequest, reason: str, now: float) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the connector keeps its blocks from now on, and the answer's `kv_transfer_params`.

        Raises:
            EngineDeadError: a real scheduler dies of this end.
        """
        return False, None

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """A request ended before it was scheduled, or was refused (then its id is empty)."""

    def arrived(self, request_id: str) -> None:
        """Its KV is here, or will never be wanted."""

    # -- time

    def tick(self, now: float) -> None:
        """Do what is due."""

    def flush(self) -> None:
        """A step begins: send what waits for one."""

    def next_timer(self) -> float | None:
        """Return when `tick` has something to do."""
        return None

    # -- what an operator sees and does

    def leases(self, now: float) -> dict[str, float]:
        """Return the handles that were given out: request id to seconds left."""
        return {}

    def end_leases(self, now: float) -> int:
        """Let all leases end now; return how many there were."""
        return 0
