"""P2P NCCL (contract `p2p-nccl`) as in vLLM 0.23: P sends each prompt's KV into D's buffer, by the
request's internal id. Pure.

Owns D's buffer, and what P is sending. The rules are those of `p2p_nccl_connector.py` and
`p2p_nccl_engine.py`:

- Any request whose id names no engines kills P once its prompt is computed, and D if more than one
  prompt token is missing there.
- A second token kills P.
- D takes the whole prompt but its last token as transferred. Its whole engine waits without a limit
  for KV that is not there.
- P's whole engine waits without a limit for a D that does not listen, or does not answer.
- D drops the KV of a request that ends, and nothing else. KV of another length than the prompt's
  kills D if it is longer.
- Unless `randomize_request_ids` is off, the two engines' internal ids differ, and D waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector, PeerCommand
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool, Page
from pdproxy_lab.sim.request import EngineDeadError

_DECODE = re.compile(r"___decode_addr_(.*):(\d+)")
_PREFILL = re.compile(r"___prefill_addr_(.*):(\d+)___")
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


class Put(PeerCommand, frozen=True):
    """Send KV to D, however long that takes. The end is reported to `P2pNccl.sent`."""

    host: str
    port: int
    key: str
    pages: tuple[Page, ...]
    tokens: int


class P2pNccl(Connector):
    """The connector of one engine, P or D by its role."""

    def __init__(self, facts: SimFacts, pool: BlockPool) -> None:
        super().__init__()
        self._facts, self._pool = facts, pool
        self._produces = facts.role == "prefill"
        self._sending = 0
        self._awaited: str | None = None
        self.buffer: dict[str, tuple[Page, ...]] = {}
        """D: what has come and was not dropped, by the request's internal id."""

    def key(self, request_id: str) -> str:
        """Return the id by which the engines know a request."""
        return request_id if self._facts.randomize_request_ids else _SUFFIX.sub("", request_id)

    @property
    def blocked(self) -> bool:
        """Whether P waits for a D, or D for KV."""
        return self._sending > 0 or (self._awaited is not None and self._awaited not in self.buffer)

    # -- P

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """Send the KV of a prompt that is computed.

        Raises:
            EngineDeadError: the id names no decode engine, or this is not the step of the first
                token.
        """
        if not self._produces:
            return
        if one.generated:
            raise EngineDeadError
        if one.computed < one.prompt:
            return
        place = _DECODE.search(one.request.id)
        if place is None:
            raise EngineDeadError
        blocks = one.blocks[: -(-one.prompt // self._facts.block_size)]
        pages = tuple(self._pool.pages[block] for block in blocks)
        self._sending += 1
        self.outbox.append(
            Put(place[1], int(place[2]), self.key(one.request.id), pages, one.prompt)
        )

    def sent(self) -> None:
        """D has the KV."""
        self._sending -= 1

    # -- D

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Take KV into the buffer."""
        self.buffer[key] = tuple(pages)

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return all tokens but the last. If they are not here, the engine waits.

        Raises:
            EngineDeadError: the id names no prefill engine.
        """
        tokens = max(one.prompt - 1 - one.computed, 0)
        if self._produces or not tokens:
            return 0, False
        if _PREFILL.search(one.request.id) is None:
            raise EngineDeadError
        self._awaited = self.key(one.request.id)
        return tokens, False

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Copy the KV from the buffer, where it stays.

        Raises:
            EngineDeadError: it has more blocks than the prompt.
        """
        pages = self.buffer[self.key(one.request.id)]
        self._awaited = None
        if len(pages) > len(one.blocks):
            raise EngineDeadError
        for block, page in zip(one.blocks, pages, strict=False):
            self._pool.pages[block] = page

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Drop the request's KV."""
        self.buffer.pop(self.key(one.request.id), None)
        return False, None

    def leases(self, now: float) -> dict[str, float]:
        """Return what D's buffer holds. Nothing there has a lease."""
        return dict.fromkeys(self.buffer, float("inf"))
