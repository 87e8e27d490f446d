"""Encoder outputs in the host memory of engines, as vLLM's `ECCPUConnector` does it. Pure.

Owns the rules of 0.32.0:

- A producer keeps what it has encoded until space is needed; then what was unused for longest goes
  first. Nobody is told. What it no longer keeps when a request ends has no address in the answer,
  and no metadata: the consumer must have the picture.
- With `ec_enable_nixl`, a consumer whose request has such an address reads the output from there
  into its own memory, before the request begins. It asks again whenever no answer comes, for 60
  seconds in all. Then, and where the producer has the output no more, it encodes the picture; the
  request fails if there is none.
- A consumer without an address encodes the picture. Without NIXL an engine has its own outputs
  alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.ec_connector import ROW_BYTES, WIDTH, ECConnector, EncoderOutput, items_of
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.request import EngineDeadError, Medium
from pdproxy_lab.sim.stats import Stats

PATIENCE = 60.0
"""Seconds that a request waits for one output in all (`_ADMIT_DEFER_TIMEOUT_S`)."""


class FetchOutput(msgspec.Struct, frozen=True):
    """Read an output of a producer. The result goes to `fetched`, `refused` or `unanswered`."""

    identifier: str
    host: str
    port: int
    rows: int
    compatibility: str


class _UnreachableError(Exception):
    """An output can't be read within its request's time."""


class _Region:
    """Outputs in an engine's memory. A row takes a block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._outputs: OrderedDict[str, EncoderOutput] = OrderedDict()
        self._awaited: dict[str, int] = {}
        """Rows of those that are being read."""
        self._written: set[str] = set()
        self._read: list[str] = []
        """Those that the step under way writes, and those that it reads: they stay."""

    def get(self, identifier: str) -> EncoderOutput | None:
        """Return an output."""
        return self._outputs.get(identifier)

    def rows(self, identifier: str) -> int | None:
        """Return how many rows an output has, also if it is being read; None: there is none."""
        output = self._outputs.get(identifier)
        return self._awaited.get(identifier) if output is None else output.rows

    def use(self, identifier: str) -> EncoderOutput | None:
        """Return an output, which is then the last one to go."""
        if identifier in self._outputs:
            self._outputs.move_to_end(identifier)
        return self._outputs.get(identifier)

    def write(self, identifier: str, output: EncoderOutput) -> bool:
        """Keep an output of the step under way; return whether there is space."""
        if not self.reserve(identifier, output.rows):
            return False
        self.fill(identifier, output)
        self._written.add(identifier)
        return True

    def read(self, identifier: str) -> EncoderOutput | None:
        """Return an output for the step under way."""
        self._read.append(identifier)
        return self._outputs.get(identifier)

    def step_over(self) -> None:
        """Outputs may go again; those that were read go last."""
        for identifier in self._read:
            self.use(identifier)
        self._read.clear()
        self._written.clear()

    def reserve(self, identifier: str, rows: int) -> bool:
        """Make space; return whether there is enough."""
        free = self.capacity - sum(self._awaited.values())
        free -= sum(output.rows for output in self._outputs.values())
        staying = self._written.union(self._read)
        going = [name for name in self._outputs if name not in staying]
        if free + sum(self._outputs[name].rows for name in going) < rows:
            return False
        for name in going:
            if free >= rows:
                break
            free += self._outputs.pop(name).rows
        self._awaited[identifier] = rows
        return True

    def fill(self, identifier: str, output: EncoderOutput) -> None:
        """Put an output into its space."""
        del self._awaited[identifier]
        self._outputs[identifier] = output

    def discard(self, identifier: str) -> None:
        """Give up the space of an output that did not come."""
        del self._awaited[identifier]

    def awaits(self, identifier: str) -> bool:
        """Return whether an output is being read."""
        return identifier in self._awaited


class ECCpu(ECConnector):
    """The connector of one engine."""

    def __init__(self, facts: SimFacts, stats: Stats, outbox: deque[Any]) -> None:
        super().__init__()
        config = facts.ec_transfer_config
        assert config is not None
        self._facts, self._config, self._stats, self._outbox = facts, config, stats, outbox
        self._region = _Region(config.extra.ec_cpu_bytes // ROW_BYTES)
        self._compatibility = f"{facts.version} {facts.model}"
        self._since: dict[tuple[str, str], float] = {}
        """Since when a request waits for an output."""
        self._now = 0.0
        """When the step began."""
        self._refused: set[str] = set()
        """Outputs that a producer does not have; the next request that wants one hears of it."""

    # -- producers

    def encoded(self, identifier: str, output: EncoderOutput) -> None:
        """Keep an output, if there is space.

        Raises:
            EngineDeadError: all of the memory would not be enough.
        """
        if not self._config.is_producer or self._region.get(identifier) is not None:
            return
        if output.rows > self._region.capacity:
            raise EngineDeadError
        if not self._region.awaits(identifier) and self._region.write(identifier, output):
            self._stats.encoder_outputs_stored += 1

    def granted(self, identifier: str, compatibility: str) -> EncoderOutput | None:
        """Return an output that is kept, for an engine of the same version and model."""
        if compatibility != self._compatibility:
            return None
        return self._region.use(identifier)

    def ended(self, one: ActiveRequest, now: float) -> dict[str, Any] | None:
        """Return what there is to know of the request's pictures, with the address of those that
        are kept.
        """
        for medium in one.request.media:
            self._since.pop((one.request.id, medium.picture.identifier), None)
        if not self._config.is_producer or not self._config.extra.ec_enable_nixl:
            return None
        items = items_of(one)
        for identifier, item in items.items():
            rows = self._region.rows(identifier)
            if rows is None:
                item["metadata"] = {}
                continue
            item["peer_host"] = self._facts.ec_side_channel_host
            item["peer_port"] = self.port
            item["size_bytes"] = rows * ROW_BYTES
            item["shape"] = [rows, WIDTH]
        return items or None

    # -- consumers

    def ready(self, one: ActiveRequest, computed: int, cached: Container[str], now: float) -> bool:
        """Read what a request names; return whether all is there, or will be encoded."""
        extra, ready = self._config.extra, True
        if not extra.ec_enable_nixl or not self._config.is_consumer or not one.ec_params:
            return True
        for medium in one.request.media:
            try:
                ready &= self._has(one, medium, computed, now)
            except _UnreachableError:
                if not self._falls_back(one, medium):
                    return False
        return ready

    def _has(self, one: ActiveRequest, medium: Medium, computed: int, now: float) -> bool:
        """Return whether an output is there, or not to be read.

        Raises:
            _UnreachableError: it can't be read.
        """
        identifier = medium.picture.identifier
        wait = one.request.id, identifier
        source = one.ec_params.get(identifier)
        if (
            medium.offset + medium.picture.length <= computed
            or self._region.get(identifier) is not None
            or not isinstance(source, dict)
            or "peer_host" not in source
        ):
            self._since.pop(wait, None)
            return True
        if now - self._since.setdefault(wait, now) >= PATIENCE:
            raise _UnreachableError
        if self._region.awaits(identifier):
            return False
        if identifier in self._refused:
            self._refused.discard(identifier)
            raise _UnreachableError
        self._fetch(medium, source)
        return False

    def _fetch(self, medium: Medium, source: dict[str, Any]) -> None:
        """Read an output, once there is space for it.

        Raises:
            _UnreachableError: what the request says of it is of no use.
        """
        identifier, rows = medium.picture.identifier, medium.picture.length
        try:
            size, shape = int(source["size_bytes"]), [int(one) for one in source["shape"]]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _UnreachableError from None
        if len(shape) != 2 or shape[0] != rows:
            raise _UnreachableError
        blocks = -(-2 * shape[0] * shape[1] // ROW_BYTES)
        if size != blocks * ROW_BYTES or not 0 < blocks <= self._region.capacity:
            raise _UnreachableError
        if not self._region.reserve(identifier, blocks):
            return
        try:
            host, port = source["peer_host"], int(source["peer_port"])
            hash(host)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _UnreachableError from None  # as in vLLM, the space is lost
        self._outbox.append(FetchOutput(identifier, str(host), port, rows, self._compatibility))

    def _falls_back(self, one: ActiveRequest, medium: Medium) -> bool:
        """Return whether the request has the picture itself; if not, it fails."""
        self._since.pop((one.request.id, medium.picture.identifier), None)
        if medium.picture.content is None:
            self.unavailable.add(one.request.id)
            return False
        one.ec_params.pop(medium.picture.identifier, None)
        return True

    def fetched(self, identifier: str, output: EncoderOutput) -> None:
        """An output has come."""
        self._region.fill(identifier, output)

    def refused(self, identifier: str) -> None:
        """The producer does not have an output."""
        self._region.discard(identifier)
        self._refused.add(identifier)

    def unanswered(self, identifier: str) -> None:
        """No answer has come: a request that still waits has the producer asked again."""
        self._region.discard(identifier)

    def has(self, identifier: str) -> bool:
        """Return whether an output is in this engine's memory, from which it may load it."""
        return self._config.is_consumer and self._region.get(identifier) is not None

    def load(self, identifier: str) -> EncoderOutput | None:
        """Return an output from this engine's memory."""
        return self._region.read(identifier)

    # -- time

    def tick(self, now: float) -> None:
        """A step begins."""
        self._now = now
        self._region.step_over()

    def next_timer(self) -> float | None:
        """Return when a request has waited for too long."""
        ends = (since + PATIENCE for since in self._since.values())
        return min((end for end in ends if end > self._now), default=None)
