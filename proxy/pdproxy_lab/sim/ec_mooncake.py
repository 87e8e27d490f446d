"""Encoder outputs that are pushed, as vLLM's `ECMooncakeConnector` does it. Pure.

Owns the rules of 0.32.0:

- A producer pushes each output to the consumer that the request names, under the transfer id that
  the request has for it: by its place among the pictures, else by its identifier. An id is pushed
  once. Whether the push succeeds changes nothing at the producer.
- A consumer never encodes a picture. A request waits for pushes under the ids that it names, and
  for one under an invented id if it names none; it also takes an output that was pushed under
  another id. It fails once it has waited for `push_wait_timeout_s`, or if one of its ids is over or
  names another picture.
- What a request has named is over when the request ends. What was pushed and not used is dropped
  after 300 seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container
from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.ec_connector import ROW_BYTES, ECConnector, EncoderOutput, items_of
from pdproxy_lab.sim.facts import ECTransferConfig
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.stats import Stats

KEPT = 300.0
"""Seconds for which a consumer keeps what was pushed, and ids that are over
(`_RESERVATION_TTL_SECONDS`).
"""
_MAX_IDS = 1 << 16
"""Ids that a producer knows to have pushed."""


class PushOutput(msgspec.Struct, frozen=True):
    """Push an output to a consumer, `tcp://HOST:PORT`."""

    consumer: str
    transfer_id: str
    identifier: str
    output: EncoderOutput


class _Transfer(msgspec.Struct):
    """One transfer at a consumer. It is awaited, pushed, loaded for a request that can use it, or
    over.
    """

    identifier: str
    deadline: float
    request_id: str = ""
    output: EncoderOutput | None = None
    loaded: bool = False
    over: bool = False

    @property
    def pushed(self) -> bool:
        """Whether its output is here, and no request has it."""
        return self.output is not None and not self.loaded


class ECMooncake(ECConnector):
    """The connector of one engine."""

    def __init__(self, config: ECTransferConfig, stats: Stats, outbox: deque[Any]) -> None:
        super().__init__()
        self._config, self._stats, self._outbox = config, stats, outbox
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._transfers: dict[str, _Transfer] = {}
        self._now = 0.0
        """When the step began."""

    # -- producers

    def produced(self, one: ActiveRequest, index: int, output: EncoderOutput) -> None:
        """Push the output of a request's picture, if the request names a consumer.

        Raises:
            EngineDeadError: the request's ids kill a real scheduler.
        """
        consumer = one.ec_params.get("consumer_zmq")
        if not self._config.is_producer or not consumer:
            return
        name = _named(one, index) or f"{one.request.id}:{index}"
        if name in self._sent:
            return
        self._sent[name] = None
        if len(self._sent) > _MAX_IDS:
            self._sent.popitem(last=False)
        identifier = one.request.media[index].picture.identifier
        self._outbox.append(PushOutput(str(consumer), name, identifier, output))

    def taken(self) -> None:
        """A consumer has taken a push."""
        self._stats.encoder_outputs_stored += 1

    # -- consumers

    def ready(self, one: ActiveRequest, computed: int, cached: Container[str], now: float) -> bool:
        """Return whether all outputs that a request needs are here.

        Raises:
            EngineDeadError: the request's ids kill a real scheduler.
        """
        ready = True
        for index, medium in enumerate(one.request.media):
            if medium.offset + medium.picture.length <= computed:
                continue
            identifier, name = medium.picture.identifier, _named(one, index)
            if not self._config.is_consumer:
                continue
            own = self._transfers.get(name or "")
            if own is not None and own.pushed:
                own.deadline = now + KEPT
            if identifier not in cached and not self._loaded(identifier, own):
                self._wait(name or f"{one.request.id}:{index}", identifier, one, now)
                ready = False
        return ready

    def _loaded(self, identifier: str, own: _Transfer | None) -> bool:
        """Load an output, unless it is, from a request's own transfer or any other; return whether
        there is one.
        """
        found = [one for one in self._transfers.values() if one.identifier == identifier]
        if any(one.loaded for one in found):
            return True
        usable = [one for one in found if one.pushed]
        if not usable:
            return False
        chosen = next((one for one in usable if one is own), usable[0])
        chosen.loaded, chosen.deadline = True, math.inf
        return True

    def _wait(self, name: str, identifier: str, one: ActiveRequest, now: float) -> None:
        deadline = now + self._config.extra.push_wait_timeout_s
        transfer = self._transfers.setdefault(name, _Transfer(identifier, deadline))
        if transfer.over or transfer.identifier != identifier:
            self.unavailable.add(one.request.id)
            return
        transfer.request_id = transfer.request_id or one.request.id
        if transfer.deadline <= now:
            self.unavailable.add(transfer.request_id)
            self._over(name, identifier, now)

    def pushed(self, transfer_id: str, identifier: str, output: EncoderOutput, now: float) -> bool:
        """Keep a push until its request uses it; return whether there was space. What is over is
        dropped.
        """
        self.tick(now)
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.over:
            return True
        if transfer is not None and (transfer.loaded or transfer.output is not None):
            return transfer.identifier == identifier
        rows = sum(one.output.rows for one in self._transfers.values() if one.output is not None)
        if (rows + output.rows) * ROW_BYTES > self._config.ec_buffer_size:
            return False
        if transfer is not None and transfer.identifier != identifier:
            self.unavailable.add(transfer.request_id)
            return True
        request_id = transfer.request_id if transfer is not None else ""
        self._transfers[transfer_id] = _Transfer(identifier, now + KEPT, request_id, output)
        return True

    def has(self, identifier: str) -> bool:
        """Return whether an output was pushed, and not used yet."""
        return any(
            one.identifier == identifier and one.output is not None
            for one in self._transfers.values()
        )

    def load(self, identifier: str) -> EncoderOutput | None:
        """Return what was loaded: the encoder's cache has it from now on."""
        for one in self._transfers.values():
            if one.loaded and one.identifier == identifier:
                found, one.output = one.output, None
                return found
        return None

    # -- both

    def ended(self, one: ActiveRequest, now: float) -> dict[str, Any] | None:
        """End the request's transfers; return what there is to know of its pictures.

        Raises:
            EngineDeadError: the request's ids kill a real scheduler.
        """
        items = items_of(one)
        for index, medium in enumerate(one.request.media):
            identifier, name = medium.picture.identifier, _named(one, index)
            if name is None:
                continue
            items[identifier]["transfer_id"] = name
            transfer = self._transfers.get(name, _Transfer(identifier, now))
            mine = transfer.identifier == identifier and not transfer.loaded
            if self._config.is_consumer and mine:
                self._over(name, identifier, now)
        return (items or None) if self._config.is_producer else None

    def _over(self, name: str, identifier: str, now: float) -> None:
        self._transfers[name] = _Transfer(identifier, now + KEPT, over=True)

    # -- time

    def tick(self, now: float) -> None:
        """Drop what was kept for long enough."""
        self._now = now
        for name, one in list(self._transfers.items()):
            if one.deadline <= now and one.over:
                del self._transfers[name]
            elif one.deadline <= now and one.pushed:
                self._over(name, one.identifier, now)

    def next_timer(self) -> float | None:
        """Return when a wait has lasted too long, or something was kept for long enough."""
        ends = (one.deadline for one in self._transfers.values())
        return min((end for end in ends if self._now < end < math.inf), default=None)


def _named(one: ActiveRequest, index: int) -> str | None:
    """Return the transfer id that a request has for a picture.

    Raises:
        EngineDeadError: what it has instead of ids kills a real scheduler.
    """
    identifier = one.request.media[index].picture.identifier
    items = one.ec_params.get("ec_items") or []
    try:
        if index < len(items):
            item = items[index]
            if item.get("mm_hash") in (None, identifier) and item.get("transfer_id"):
                return str(item["transfer_id"])
        for item in items:
            if item.get("mm_hash") == identifier and item.get("transfer_id"):
                return str(item["transfer_id"])
    except (AttributeError, KeyError, TypeError):
        raise EngineDeadError from None
    return None
