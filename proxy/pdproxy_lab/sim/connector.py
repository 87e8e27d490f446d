"""The interface between the engine's core and a KV connector, in the order in which the core calls
it. Pure.

It follows vLLM's `KVConnectorBase_V1`; `Connector` itself does nothing. There is one file per
connector: `nixl`, `lmcache_pd`, `lmcache_mp`, `shared`, `kvstore_keys`, `cpu`; `connectors` lists
them. What happens outside of the core (a transfer, a notice to the proxy) is in `outbox` as
commands; the driver carries them out and reports the results.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import msgspec

from pdproxy_lab.sim.active import ActiveRequest


class ProxyNotice(msgspec.Struct, frozen=True):
    """Send a notice to the proxy. There is no answer."""

    message: dict[str, Any]
    """A msgpack map over ZMQ, a JSON object over HTTP."""
    rank: int = 0
    """The worker that sends it."""


class KvLoad(Protocol):
    """What has brought a request's KV."""

    @property
    def request_id(self) -> str:
        """The request."""

    @property
    def tokens(self) -> int:
        """The number of its tokens whose KV came."""


class PeerCommand(msgspec.Struct, frozen=True):
    """Something for another engine, which `registered_link` carries out."""


class Connector:
    """One engine's connector. This one moves no KV and ignores all `kv_transfer_params`."""

    keeps_aborted_loads = True
    """Whether a request that is aborted while its KV is on its way keeps its blocks until that has
    come.
    """
    lost_loads_kill = True
    """Whether the core dies when a request whose KV can never come is aborted. If not, its blocks
    are lost.
    """

    pulls_in_step = False
    """Whether a step begins the transfers of the requests scheduled in it, and waits until they
    have begun.
    """

    def __init__(self) -> None:
        self.outbox: deque[Any] = deque()
        """Commands: `Tell`, and each connector's own."""
        self.broken: set[str] = set()
        """Requests whose KV was read in vain, before they were scheduled."""

    @property
    def blocked(self) -> bool:
        """Whether a worker waits for another process, and with it the whole engine."""
        return False

    @property
    def contacted(self) -> frozenset[str] | None:
        """Ids of the engines with which this run has made a handshake, None if there are none."""
        return None

    @property
    def waits_for_step(self) -> bool:
        """Whether something would be sent by a step."""
        return False

    # -- a request before its first step

    def queued(self, one: ActiveRequest) -> None:
        """The scheduler has the request."""

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens beyond `one.computed` come from elsewhere, and whether they come
        later, by a command.

        What does not come later is there already: `load` loads it in the same step.
        """
        return 0, False

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """Take note of the blocks for a request that is scheduled for the first time; return
        whether its KV can come at all.

        Raises:
            EngineDeadError: its parameters kill a real scheduler.
        """
        return True

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Write the KV of `tokens` tokens behind `one.computed` into its blocks, in the step that
        schedules it.

        Raises:
            EngineDeadError: the KV that `wanted` returned is not there.
        """

    # -- its steps

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """A step has computed its KV up to `one.computed`; `first`: it was the request's first one.

        Raises:
            EngineDeadError: saving it kills a real engine's process.
        """

    # -- its end

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the connector keeps its blocks from now on, and the answer's
        `kv_transfer_params`.

        Raises:
            EngineDeadError: a real scheduler dies of it.
        """
        return False, None

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """A request ended before it was scheduled, or was refused (then its id is empty)."""

    def arrived(self, request_id: str) -> None:
        """Its KV is here, or is no longer needed."""

    def loaded(self, load: Any) -> None:
        """Its KV is in its blocks."""

    def failed(self, request_id: str) -> None:
        """Its KV can't come."""

    # -- time

    def tick(self, now: float) -> None:
        """Do what is due at this time."""

    def flush(self) -> None:
        """A step begins: send the commands that wait for one."""

    def next_timer(self) -> float | None:
        """Return when `tick` has something to do."""
        return None

    # -- for an operator

    def leases(self, now: float) -> dict[str, float]:
        """Return P's handles that have not ended: request id to seconds left."""
        return {}

    def end_leases(self, now: float) -> int:
        """End all leases now; return how many there were."""
        return 0

    def awaited(self, now: float) -> dict[str, float]:
        """Return D's requests whose blocks only a push frees, aborted ones too: request id to
        seconds since it was registered.
        """
        return {}

    def registrations(self) -> list[str]:
        """Return D's request ids for which P has nothing to push yet."""
        return []
