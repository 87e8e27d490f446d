"""MoRIIO (contract `moriio`) as in vLLM 0.32.0: D reads P's blocks (READ), or P writes into D's (WRITE). Pure.

Owns P's blocks that D has not taken, and what D is waiting for. The rules are those of `moriio_connector.py` and its parts:

- P keeps blocks of a request with `do_remote_decode` that ended by length, until D reports that it has read, until P has written,
  or for `defer_timeout`. A report that comes before the request's end counts, too. A transfer that is over is never written.
- WRITE: P's core dies of a request without `remote_engine_id` or `remote_block_ids` (null is enough), and of one that names no
  decode engine. D reports its blocks to the prefill engine in the request's id (or in its parameters; its core dies if there is
  neither), and waits without a limit. If the request is aborted meanwhile, its blocks stay until P has written.
- READ: D takes all tokens but the last of any request as transferred. Without parameters nothing is read: the answer comes from
  what the blocks hold. Its whole engine waits for a read.
- A D that drops or refuses a request before it is scheduled reports to P that its blocks may be freed.
- An engine keeps what it learned at its first contact: it can't transfer with the next process at the same address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pdproxy.sim.active import ActiveRequest
from pdproxy.sim.connector import Connector, PeerCommand
from pdproxy.sim.facts import Facts
from pdproxy.sim.memory import BlockPool, Page
from pdproxy.sim.request import EngineDeadError

_PREFILL = re.compile(r"___prefill_addr_(.+?)___decode_addr_")
_DECODE = re.compile(r"___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$")
_MAX_TERMINAL = 4096


class Place(msgspec.Struct, frozen=True):
    """Where another engine takes messages."""

    host: str
    port: int


class Read(PeerCommand, frozen=True):
    """Read blocks of P. The result goes to `Moriio.was_read`; P is told that its blocks may be freed."""

    place: Place
    request_id: str
    transfer_id: str
    blocks: tuple[int, ...]
    tokens: int


class Report(PeerCommand, frozen=True):
    """Report to P: D's blocks are ready to be written ("blocks"), or P's may be freed ("release"). There is no answer."""

    place: Place
    kind: str
    transfer_id: str
    blocks: tuple[int, ...] = ()
    answer_to: Place | None = None
    request_id: str = ""
    """D's request, whose blocks they are."""


class WriteBlocks(PeerCommand, frozen=True):
    """Write P's pages into blocks of D. The end is reported to `Moriio.wrote`."""

    place: Place
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


class Moriio(Connector):
    """The connector of one engine, P or D by its role."""

    def __init__(self, facts: Facts, pool: BlockPool) -> None:
        super().__init__()
        self._facts, self._pool = facts, pool
        self._reads = facts.transfer_mode == "READ"
        self._produces = (
            facts.kv_role or ("kv_consumer" if facts.role == "decode" else "kv_producer")
        ) == "kv_producer"
        self.address = Place("", 0)
        """Where this engine takes messages; set by its driver."""
        # P
        self.held: dict[str, _Held] = {}
        self._parked: set[str] = set()
        self._terminal: dict[str, None] = {}
        self._to_write: dict[str, list[int]] = {}
        self._destinations: dict[str, tuple[Place, tuple[int, ...]]] = {}
        # D
        self._reading: str | None = None
        self._left = False
        """Whether the request that is read for has ended."""
        self._pages: dict[str, tuple[Page, ...]] = {}
        self._loading: dict[str, tuple[str, int]] = {}

    @property
    def blocked(self) -> bool:
        """Whether D waits for a read."""
        return self._reading is not None

    def next_timer(self) -> float | None:
        """Return when the next blocks are freed that nobody has taken."""
        return min((held.expires for held in self.held.values()), default=None)

    def tick(self, now: float) -> None:
        """Free blocks that nobody has taken in time."""
        for name in [name for name, held in self.held.items() if held.expires <= now]:
            self._free(name)

    def leases(self, now: float) -> dict[str, float]:
        """Return P's transfers whose blocks are kept, with the seconds left."""
        return {name: held.expires - now for name, held in self.held.items()}

    def end_leases(self, now: float) -> int:
        """Free all kept blocks; return how many transfers had some."""
        count = len(self.held)
        for name in list(self.held):
            self._free(name)
        return count

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """D, WRITE: report the request's blocks to P.

        Raises:
            EngineDeadError: nothing names P.
        """
        params = one.params
        if self._produces or not params or not params.get("do_remote_prefill"):
            return True
        params["do_remote_prefill"] = False  # one transfer per request
        name, place = self._name(one), self._prefill_of(one.request.id, params)
        if self._reads:
            if one.request.id not in self._pages and params.get("remote_block_ids") and place is not None:
                self.outbox.append(Report(place, "release", name))  # all of it is here already
            return True
        if place is None:
            raise EngineDeadError
        self._loading[name] = (one.request.id, tokens)
        self.outbox.append(Report(place, "blocks", name, tuple(one.blocks), self.address, one.request.id))
        return True

    # -- P

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """P, WRITE: once the prompt is computed, write its KV as soon as D's blocks are known.

        Raises:
            EngineDeadError: parameters are missing, or nothing names a decode engine.
        """
        params = one.params
        if not self._produces or self._reads or not params or not params.get("do_remote_decode"):
            return
        if one.computed < one.prompt or one.generated:
            return
        if "remote_engine_id" not in params or "remote_block_ids" not in params:
            raise EngineDeadError
        if _place(_DECODE.search(one.request.id)) is None and not params.get("remote_host"):
            raise EngineDeadError
        name = self._name(one)
        if name not in self._terminal:
            self._to_write[name] = list(one.blocks[: -(-one.prompt // self._facts.block_size)])
            self._write_if_known(name)

    def ended(self, one: ActiveRequest, reason: str, now: float) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill that ended by length, and return what D needs."""
        params, name = one.params, self._name(one)
        if not self._produces:
            self._pages.pop(one.request.id, None)
            self._left = self._reading == one.request.id
        if not self._produces or not params or not params.get("do_remote_decode"):
            return False, None
        if reason != "length":
            self._to_write.pop(name, None)
            return False, None
        kept = name not in self._parked
        if kept:
            self.held[name] = _Held(list(one.blocks), now + self._facts.defer_timeout)
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
        return tuple(self._pool.pages[block] for block in blocks if 0 <= block < len(self._pool.pages))

    def reported(self, kind: str, name: str, blocks: Sequence[int], answer_to: Place) -> None:
        """Take a decode engine's report."""
        if kind == "release":
            self._finish(name)
        elif name not in self._terminal:
            self._destinations[name] = answer_to, tuple(blocks)
            self._write_if_known(name)

    def _write_if_known(self, name: str) -> None:
        if name in self._to_write and name in self._destinations:
            place, blocks = self._destinations.pop(name)
            pages = tuple(self._pool.pages[block] for block in self._to_write[name])
            self.outbox.append(WriteBlocks(place, name, blocks[: len(pages)], pages[: len(blocks)]))

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
        """Return how many tokens come from P."""
        missing = max(one.prompt - one.computed, 0)
        params = one.params or {}
        if self._produces:
            return 0, False
        if not self._reads:
            return (missing, True) if params.get("do_remote_prefill") else (0, False)
        groups = params.get("remote_block_ids")
        wants = params.get("do_remote_prefill") and groups and "remote_engine_id" in params
        known = one.request.id in self._pages or one.request.id in self.broken
        if wants and missing > 1 and not known:
            place = self._prefill_of(one.request.id, params)
            if place is None:
                raise EngineDeadError
            assert groups is not None
            self._reading = one.request.id
            blocks = tuple(int(block) for block in groups[0])
            self.outbox.append(Read(place, one.request.id, self._name(one), blocks, missing - 1))
        return max(missing - 1, 0), False

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
        """Copy the pages that were read. A request that had nothing read uses what its blocks hold."""
        for block, page in zip(one.blocks, self._pages.pop(one.request.id, ()), strict=False):
            self._pool.pages[block] = page

    def written(self, name: str, blocks: Sequence[int], pages: Sequence[Page]) -> None:
        """P has written into blocks here, whoever has these by now."""
        for block, page in zip(blocks, pages, strict=True):
            self._pool.pages[block] = page
        found = self._loading.pop(name, None)
        if found is not None:
            self.outbox.append(Written(*found))

    def dropped(self, request_id: str, params: dict[str, Any] | None) -> None:
        """Report to P that its blocks may be freed: a request ended before it was scheduled, or was refused.

        Raises:
            EngineDeadError: READ, and nothing names P.
        """
        if self._produces or not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        place = self._prefill_of(request_id, params)
        if place is not None and "transfer_id" in params:
            self.outbox.append(Report(place, "release", str(params["transfer_id"])))
        elif self._reads:
            raise EngineDeadError

    @staticmethod
    def _name(one: ActiveRequest) -> str:
        return str((one.params or {}).get("transfer_id") or f"sidecar-{one.request.id}")

    @staticmethod
    def _prefill_of(request_id: str, params: dict[str, Any]) -> Place | None:
        found = _place(_PREFILL.search(request_id))
        if found is None and params.get("remote_host") and params.get("remote_notify_port"):
            found = Place(str(params["remote_host"]), int(params["remote_notify_port"]))
        return found


def _place(match: re.Match[str] | None) -> Place | None:
    """Return where the engine takes messages that is named in a request's id.

    Raises:
        EngineDeadError: the address has another form.
    """
    if match is None:
        return None
    parts = dict(segment.partition(":")[::2] for segment in match[1].split(","))
    try:
        return Place(parts["host"], int(parts["notify"]))
    except (KeyError, ValueError) as error:
        raise EngineDeadError from error
