"""MoRIIO (contract `moriio`) as in vLLM 0.32.0: D reads P's blocks (READ), or P writes into D's
(WRITE). Pure.

Owns P's blocks that D has not taken, and what D is waiting for. The rules are those of
`moriio_connector.py` and its parts; those for parameters are in `moriio_params`:

- P keeps blocks of a request with `do_remote_decode` that ended by length, until D reports that it
  has read, until P has written, or for `defer_timeout`. A report that comes before the request's
  end counts, too. A transfer that is over is never written.
- WRITE: P's core dies of a request without `remote_engine_id` or `remote_block_ids` (null is
  enough), and of one that names no decode engine. D reports its blocks to the prefill engine in the
  request's id (or in its parameters; its core dies if there is neither), and waits without a limit.
  P writes to the decode engine in its own request's id. With more blocks than D has, P writes
  nothing, and D waits on. What did not end by length is written all the same, whatever its blocks
  hold by then.
- WRITE: a D that is aborted while it waits never frees its blocks. It forgets the transfer at once
  (`request_finished` unmaps it), so the report that P has written (`get_finished` looks for the
  transfer) finds no request.
- READ: D takes all tokens but the last of any request as transferred. Without parameters nothing is
  read: the answer comes from what the blocks hold. Its whole engine waits for a read. Blocks are
  paired with P's last ones; with two more than P's its core dies; one more is for the token that it
  computes itself.
- A D that drops or refuses a request before it is scheduled reports to P that its blocks may be
  freed.
- A prompt with `do_remote_decode` on a D that ends by length keeps its blocks for ever: nothing
  looks for a timeout there.
- A message that an engine's listener does not expect (D's empty list of blocks; any for the other
  role) ends the listener.
- An engine keeps what it learned at its first contact: it can't transfer with the next process at
  the same address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector, PeerCommand
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool, Page
from pdproxy_lab.sim.moriio_params import MessageAddress, peer, released_at, reported_to
from pdproxy_lab.sim.request import EngineDeadError

_MAX_TERMINAL = 4096


class Read(PeerCommand, frozen=True):
    """Read blocks of P. The result goes to `Moriio.was_read`; P is told that its blocks may be
    freed.
    """

    place: MessageAddress
    request_id: str
    transfer_id: str
    blocks: tuple[int, ...]
    tokens: int


class Report(PeerCommand, frozen=True):
    """Report to P: D's blocks are ready to be written ("blocks"), or P's may be freed ("release").
    There is no answer.
    """

    place: MessageAddress
    kind: str
    transfer_id: str
    blocks: tuple[int, ...] = ()
    request_id: str = ""
    """D's request, whose blocks they are."""


class WriteBlocks(PeerCommand, frozen=True):
    """Write P's pages into blocks of D. The end is reported to `Moriio.wrote`."""

    place: MessageAddress
    transfer_id: str
    blocks: tuple[int, ...]
    pages: tuple[Page, ...]


class Written(PeerCommand, frozen=True):
    """All KV of a waiting request of D is in its blocks: `Core.written_by_peer` takes it."""

    request_id: str
    tokens: int


class _Held(msgspec.Struct):
    blocks: list[int]
    expires: float


class _Write(msgspec.Struct):
    """What P will write once D has reported its blocks."""

    place: MessageAddress
    blocks: list[int]
    expires: float


class Moriio(Connector):
    """The connector of one engine, P or D by its role."""

    def __init__(self, facts: SimFacts, pool: BlockPool) -> None:
        super().__init__()
        self._facts, self._pool = facts, pool
        self._reads = facts.transfer_mode == "READ"
        self._produces = (
            facts.kv_role or ("kv_consumer" if facts.role == "decode" else "kv_producer")
        ) == "kv_producer"
        self.address = MessageAddress("", 0)
        """Where this engine takes messages; set by its driver."""
        # P
        self.held: dict[str, _Held] = {}
        self._parked: set[str] = set()
        self._terminal: dict[str, None] = {}
        self._to_write: dict[str, _Write] = {}
        self._destinations: dict[str, tuple[int, ...]] = {}
        # D
        self._reading: str | None = None
        self._left = False
        """Whether the request that is read for has ended."""
        self._pages: dict[str, tuple[Page, ...]] = {}
        self._loading: dict[str, tuple[str, int]] = {}
        self._unknown: set[str] = set()
        """Transfers that P has written and no request waits for."""
        self.deaf = False
        """Whether the listener for other engines' messages has ended."""

    @property
    def blocked(self) -> bool:
        """Whether D waits for a read."""
        return self._reading is not None

    def next_timer(self) -> float | None:
        """Return when the next transfer is over that nobody has taken."""
        times = [one.expires for one in self.held.values()] + [
            one.expires for one in self._to_write.values()
        ]
        return min((time for time in times if time < math.inf), default=None)

    def tick(self, now: float) -> None:
        """End transfers that nobody has taken in time, and free their blocks."""
        for name in [name for name, held in self.held.items() if held.expires <= now]:
            self._free(name)
        for name in [name for name, one in self._to_write.items() if one.expires <= now]:
            self._finish(name)

    def leases(self, now: float) -> dict[str, float]:
        """Return P's transfers whose blocks are kept, with the seconds left."""
        return {name: held.expires - now for name, held in self.held.items()}

    def end_leases(self, now: float) -> int:
        """Free all kept blocks, which keep their content (see `Nixl.end_leases`); return how many
        transfers had some.
        """
        count = len(self.held)
        for name, held in list(self.held.items()):
            self._pool.unlend(held.blocks)
            self._free(name)
        return count

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """WRITE: report D's blocks to P. READ: report to P that nothing has to be read, if all of
        it is here already.

        Raises:
            EngineDeadError: nothing names P, or a parameter is missing.
        """
        request_id, params = one.request.id, one.params
        if not params or not params.get("do_remote_prefill"):
            return True
        params["do_remote_prefill"] = False  # one transfer per request
        if self._reads:
            if _names_blocks(params) and request_id not in self._pages:
                self._release(self._source(request_id, self._named(one)), self._name(one))
            return True
        place, name = reported_to(request_id, params), self._name(one)
        if not self._produces:
            self._loading[name] = (request_id, tokens)
        if place is not None:
            blocks = tuple(one.blocks) if tokens else ()
            self.outbox.append(Report(place, "blocks", name, blocks, request_id))
        if name in self._unknown:
            self._unknown.discard(name)
            self.outbox.append(Written(*self._loading.pop(name)))
        return True

    # -- P

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """P, WRITE: once the prompt is computed, write its KV as soon as D's blocks are known.

        Raises:
            EngineDeadError: parameters are missing, or nothing names a decode engine.
        """
        params = one.params
        if self._reads or not params or not params.get("do_remote_decode"):
            return
        if one.computed < one.prompt or one.generated or not (first or self._produces):
            return
        place, name = peer(one.request.id, self._named(one), decode=True), self._name(one)
        if self._produces and name not in self._terminal:
            blocks = list(one.blocks[: -(-one.prompt // self._facts.block_size)])
            self._to_write[name] = _Write(place, blocks, now + self._facts.defer_timeout)
            self._pool.lend(blocks)
            self._write_if_known(name)

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill that ended by length, and return what D needs."""
        params, name = one.params, self._name(one)
        if not self._produces:
            self._pages.pop(one.request.id, None)
            self._left = self._reading == one.request.id
        if not params or not params.get("do_remote_decode") or reason != "length":
            return False, None
        kept = name not in self._parked
        if kept:
            expires = now + self._facts.defer_timeout if self._produces else math.inf
            self.held[name] = _Held(list(one.blocks), expires)
        self._pool.lend(one.blocks)
        self._parked.discard(name)
        answer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(one.blocks)],
            "remote_engine_id": f"{self.address.host}:{self.address.port}",
            "remote_host": self.address.host,
            "remote_handshake_port": str(self.address.port),
            "remote_notify_port": str(self.address.port),
            "remote_dp_rank": 0,
            "remote_dp_rank_override": True,
            "remote_dp_size": 1,
            "remote_dp_size_local": 1,
            "tp_size": self._facts.tensor_parallel_size,
            "transfer_id": name,
        }
        return kept, answer

    def pages_at(self, blocks: Sequence[int]) -> tuple[Page, ...]:
        """Return what blocks hold now."""
        return tuple(
            self._pool.pages[block] for block in blocks if 0 <= block < len(self._pool.pages)
        )

    def reported(self, kind: str, name: str, blocks: Sequence[int]) -> None:
        """Take a decode engine's report."""
        self.deaf |= not self._produces or (kind == "blocks" and not blocks)
        if self.deaf:
            return
        if kind == "release":
            self._finish(name)
        elif name not in self._terminal:
            self._destinations[name] = tuple(blocks)
            self._write_if_known(name)

    def _write_if_known(self, name: str) -> None:
        if name not in self._to_write or name not in self._destinations:
            return
        one, blocks = self._to_write.pop(name), self._destinations.pop(name)
        if len(one.blocks) > len(blocks):
            self._finish(name)
            return
        pages = tuple(self._pool.pages[block] for block in one.blocks)
        self.outbox.append(WriteBlocks(one.place, name, blocks[: len(pages)], pages))

    def wrote(self, name: str) -> None:
        """The pages are at D, or can't be written."""
        self._finish(name)

    def _finish(self, name: str) -> None:
        """The transfer is over: its blocks are free, now or when its request ends."""
        if name in self.held:
            self._free(name)
        elif name not in self._terminal:
            self._parked.add(name)
        self._close(name)

    def _free(self, name: str) -> None:
        self._pool.release(self.held.pop(name).blocks)
        self._close(name)

    def _close(self, name: str) -> None:
        self._to_write.pop(name, None)
        self._destinations.pop(name, None)
        self._terminal[name] = None
        while len(self._terminal) > _MAX_TERMINAL:
            del self._terminal[next(iter(self._terminal))]

    # -- D

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens come from P. READ: have them read first.

        Raises:
            EngineDeadError: nothing names P, a parameter is missing, or P has too few blocks.
        """
        missing = max(one.prompt - one.computed, 0)
        params, request_id = one.params or {}, one.request.id
        if self._produces:
            return 0, False
        if not self._reads:
            return (missing, True) if params.get("do_remote_prefill") else (0, False)
        wants = missing > 1 and params.get("do_remote_prefill") and _names_blocks(params)
        if wants and request_id not in self._pages and request_id not in self.broken:
            place, blocks = self._source(request_id, self._named(one)), self._paired(one)
            if blocks:
                self._reading = request_id
                self.outbox.append(Read(place, request_id, self._name(one), blocks, missing - 1))
        return max(missing - 1, 0), False

    def _paired(self, one: ActiveRequest) -> tuple[int, ...]:
        """Return those of P's blocks that are read into the first blocks of a request
        (`_align_read_blocks`).
        """
        groups, mine = (
            (one.params or {})["remote_block_ids"],
            -(-one.prompt // self._facts.block_size),
        )
        try:
            (group,) = groups
            theirs = tuple(int(block) for block in group)
        except (TypeError, ValueError) as error:
            raise EngineDeadError from error
        if mine > len(theirs) + 1:
            raise EngineDeadError
        return theirs[-mine:]

    def was_read(self, request_id: str, pages: Sequence[Page] | None) -> None:
        """The read has ended; None: it failed."""
        self._reading, left, self._left = None, self._left, False
        if left:
            return
        if pages is None:
            self.broken.add(request_id)
        else:
            self._pages[request_id] = tuple(pages)

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Copy the pages that were read. A request that had nothing read uses what its blocks
        hold.
        """
        for block, page in zip(one.blocks, self._pages.pop(one.request.id, ()), strict=False):
            self._pool.pages[block] = page

    def arrived(self, request_id: str) -> None:
        """Forget the transfer of a request that is over: P's report finds nothing then."""
        self._loading = {name: one for name, one in self._loading.items() if one[0] != request_id}

    def written(self, name: str, blocks: Sequence[int], pages: Sequence[Page]) -> None:
        """P has written into blocks here, whoever has these by now."""
        for block, page in zip(blocks, pages, strict=True):
            self._pool.pages[block] = page
        self.deaf |= self._produces
        found = self._loading.pop(name, None)
        if self.deaf:
            return
        if found is None:
            self._unknown.add(name)
        else:
            self.outbox.append(Written(*found))

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """Report to P that its blocks may be freed: a request ended before it was scheduled, or was
        refused.

        Raises:
            EngineDeadError: READ, and nothing names P, or a parameter is missing.
        """
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        name = params.get("transfer_id")
        if not self._reads:
            place = None if name is None else released_at(request_id, params)
            if place is not None:
                self._release(place, str(name))
            return
        self._release(self._source(request_id, params), str(name))

    def _release(self, place: MessageAddress, name: str) -> None:
        if not (self._produces and self._reads):  # its workers get what D's ranks would report
            self.outbox.append(Report(place, "release", name))

    def _source(self, request_id: str, params: dict[str, Any]) -> MessageAddress:
        return peer(request_id, params, ranked=not self._produces)

    @staticmethod
    def _name(one: ActiveRequest) -> str:
        return str((one.params or {}).get("transfer_id") or f"sidecar-{one.request.id}")

    def _named(self, one: ActiveRequest) -> dict[str, Any]:
        """Return a request's parameters, with a name if they have none."""
        return {"transfer_id": self._name(one), **(one.params or {})}


def _names_blocks(params: dict[str, Any]) -> bool:
    return bool(params.get("remote_block_ids")) and "remote_engine_id" in params
