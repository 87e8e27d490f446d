"""Encoder outputs in storage that engines share, as vLLM's `ECExampleConnector` does it. Pure.

Owns the rules of 0.32.0: producers store whatever they encode, and nothing is ever evicted; any
engine encodes nothing that is stored, and consumers load it. No request says anything about it.
"""

from __future__ import annotations

from typing import Any

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.ec_connector import ECConnector, EncoderOutput, OutputStorage, items_of
from pdproxy_lab.sim.facts import ECTransferConfig
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.stats import Stats


class ECExample(ECConnector):
    """The connector of one engine."""

    def __init__(self, config: ECTransferConfig, stats: Stats, storage: OutputStorage) -> None:
        super().__init__()
        self._config, self._stats, self._storage = config, stats, storage

    def has(self, identifier: str) -> bool:
        """Return whether an output is stored.

        Raises:
            EngineDeadError: the identifier can't be the name of a folder.
        """
        try:
            return self._storage.has(identifier)
        except (OSError, ValueError):
            raise EngineDeadError from None

    def load(self, identifier: str) -> EncoderOutput | None:
        """Return a stored output; None: this engine only produces.

        Raises:
            EngineDeadError: the file is gone, or not whole.
        """
        if not self._config.is_consumer:
            return None
        try:
            return self._storage.get(identifier)
        except (OSError, ValueError):
            raise EngineDeadError from None

    def encoded(self, identifier: str, output: EncoderOutput) -> None:
        """Store an output.

        Raises:
            EngineDeadError: it can't be written.
        """
        if not self._config.is_producer:
            return
        try:
            self._storage.put(identifier, output)
        except (OSError, ValueError):
            raise EngineDeadError from None
        self._stats.encoder_outputs_stored += 1

    def ended(self, one: ActiveRequest, now: float) -> dict[str, Any] | None:
        """Return what there is to know of the request's pictures."""
        return (items_of(one) or None) if self._config.is_producer else None
