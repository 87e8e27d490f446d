"""The interface between the engine's core and an EC connector, which moves encoder outputs, in the
order in which the core calls it. Pure.

It follows vLLM's `ECConnectorBase`; `ECConnector` itself does nothing. There is one file per
connector: `ec_example`, `ec_cpu`, `ec_mooncake`; `connectors` lists them. What happens outside of
the core is in the core's outbox as commands; `ec_link` carries them out.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

import msgspec

from pdproxy_lab.sim.active import ActiveRequest

WIDTH = 1536
"""Numbers in a row of an encoder output: that of Qwen2-VL's 2B model."""
ROW_BYTES = 2 * WIDTH


class EncoderOutput(msgspec.Struct, frozen=True):
    """What an encoder makes of a picture."""

    content: int
    rows: int
    """One for each of the picture's tokens."""


class OutputStorage(Protocol):
    """Encoder outputs by identifier, for the engines that share them."""

    def has(self, identifier: str) -> bool:
        """Return whether there is an output."""

    def get(self, identifier: str) -> EncoderOutput:
        """Return an output."""

    def put(self, identifier: str, output: EncoderOutput) -> None:
        """Store an output, in place of the one before."""


class ECConnector:
    """One engine's connector. This one moves no outputs and ignores all `ec_transfer_params`."""

    port = 0
    """Where other engines reach this one, once its link listens."""

    def __init__(self) -> None:
        self.unavailable: set[str] = set()
        """Requests whose encoder outputs can't come: the core fails them, and takes them from
        here.
        """

    # -- a request before its first step

    def ready(self, one: ActiveRequest, computed: int, cached: Container[str], now: float) -> bool:
        """Return whether a request may begin behind its first `computed` tokens; if not, its
        outputs are on their way. `cached`: what the encoder's cache has.

        Raises:
            EngineDeadError: its parameters kill a real scheduler.
        """
        return True

    # -- its steps

    def has(self, identifier: str) -> bool:
        """Return whether a picture need not be encoded.

        Raises:
            EngineDeadError: looking for it kills a real engine.
        """
        return False

    def load(self, identifier: str) -> EncoderOutput | None:
        """Return an output that there is, None if this engine does not load it.

        Raises:
            EngineDeadError: it can't be read.
        """
        return None

    def encoded(self, identifier: str, output: EncoderOutput) -> None:
        """The encoder has computed an output.

        Raises:
            EngineDeadError: storing it kills a real engine.
        """

    def produced(self, one: ActiveRequest, index: int, output: EncoderOutput) -> None:
        """The output of a request's picture is in the encoder's cache, since now or before."""

    # -- its end

    def ended(self, one: ActiveRequest, now: float) -> dict[str, Any] | None:
        """Return the answer's `ec_transfer_params`."""
        return None

    # -- other engines

    def granted(self, identifier: str, compatibility: str) -> EncoderOutput | None:
        """Return an output that another engine asks for, None if it gets none. `compatibility`:
        what both must have in common.
        """
        return None

    def pushed(self, transfer_id: str, identifier: str, output: EncoderOutput, now: float) -> bool:
        """Take an output from another engine; return whether there was space for it."""
        return False

    # -- time

    def tick(self, now: float) -> None:
        """Do what is due at this time."""

    def next_timer(self) -> float | None:
        """Return when `tick` has something to do."""
        return None


def items_of(one: ActiveRequest) -> dict[str, dict[str, Any]]:
    """Return what a producer says of a request's pictures: by identifier, the places among them and
    what a consumer needs to know in place of the picture.
    """
    items: dict[str, dict[str, Any]] = {}
    for index, medium in enumerate(one.request.media):
        grid = medium.picture.grid
        item = items.setdefault(medium.picture.identifier, {"item_indices": []})
        item["metadata"] = {"image_grid_thw": list(grid)} if grid else {}
        item["item_indices"].append(index)
    return items
