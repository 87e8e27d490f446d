"""The PD buffer of one rank of a decode engine with LMCache: chunks that were pushed and not read
yet. Pure.

Owns the chunks, their reference counts and the pushes that wait for space. The rules are those of
LMCache 0.5.6's PD backends:

- A chunk is in the buffer as soon as its space is allocated, before its KV is written: a lookup
  then finds it, and a read gets whatever is there.
- Each push of a chunk adds a reference, each read removes one. A chunk that is pushed and never
  read stays.
- A full buffer makes pushes wait. `sync`: one at a time, all others behind it, without a limit.
  `async`: a request's first push reserves space for all of its chunks, until its last push has been
  allocated. A push is refused if its request can never fit, after `pd_allocation_timeout_sec`, or
  if its request pushes more chunks than it announced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdproxy_lab.sim.facts import LMCacheFacts
from pdproxy_lab.sim.memory import Page

Answer = Callable[["Allocation"], None]


class ChunkBatch(msgspec.Struct, frozen=True):
    """The chunks of one request that one step of one rank pushes."""

    request: str
    """The `disagg_spec.req_id`."""
    keys: tuple[str, ...]
    pages: tuple[tuple[Page, ...], ...]
    total: int
    """Chunks of the whole request."""
    last: bool


class Allocation(msgspec.Struct, frozen=True):
    """The answer to a batch: refused, or allocated; chunks that are `present` need not be
    written.
    """

    refused: bool = False
    present: tuple[str, ...] = ()


class _Held(msgspec.Struct):
    references: int = 1
    pages: tuple[Page, ...] | None = None


class _Waiting(msgspec.Struct):
    batch: ChunkBatch
    answer: Answer
    until: float
    reserved: bool = False


class PDBuffer:
    """The buffer of one rank."""

    def __init__(self, config: LMCacheFacts, chunks: int) -> None:
        self.capacity = chunks
        self.held: dict[str, _Held] = {}
        self._sync = config.pd_backend_mode == "sync"
        self._timeout = config.pd_allocation_timeout_sec
        self._waiting: list[_Waiting] = []
        self._reserved: dict[str, int] = {}
        self._allocated: dict[str, list[str]] = {}

    @property
    def waiting(self) -> int:
        """Pushes that wait for space."""
        return len(self._waiting)

    # -- pushes

    def offer(self, batch: ChunkBatch, now: float, answer: Answer) -> None:
        """Ask for space; the answer may come later."""
        self._waiting.append(_Waiting(batch, answer, now + self._timeout))
        self.tick(now)

    def write(self, keys: Sequence[str], pages: Sequence[tuple[Page, ...]]) -> None:
        """Write chunks whose space was allocated."""
        for key, one in zip(keys, pages, strict=True):
            if (held := self.held.get(key)) is not None:
                held.pages = one

    def cancel(self, request: str, keys: Sequence[str], now: float) -> None:
        """Remove the chunks of a push that was cancelled (`async`)."""
        for key in keys:
            self._drop(key)
        self._forget(request)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Answer the pushes that need not wait any longer."""
        for one in list(self._waiting):
            allocation = self._allocate(one, now)
            if allocation is not None:
                self._waiting.remove(one)
                one.answer(allocation)
            elif self._sync:
                return

    def next_timer(self) -> float | None:
        """Return when the next push has waited too long."""
        times = [one.until for one in self._waiting if one.until != float("inf")]
        return None if self._sync else min(times, default=None)

    def _allocate(self, one: _Waiting, now: float) -> Allocation | None:
        batch = one.batch
        if not self._sync and (refusal := self._admit(one, now)) is not None:
            return refusal if refusal.refused else None
        new = [key for key in batch.keys if key not in self.held]
        if len(self.held) + len(new) > self.capacity:
            if self._sync or now < one.until:
                return None
            self._roll_back(batch.request)
            return Allocation(refused=True)
        present = tuple(key for key in batch.keys if key in self.held)
        for key in present:
            self.held[key].references += 1
        self.held |= {key: _Held() for key in new}
        if not self._sync and batch.request:
            self._allocated.setdefault(batch.request, []).extend(batch.keys)
            if batch.last:
                self._forget(batch.request)
        return Allocation(present=present)

    def _admit(self, one: _Waiting, now: float) -> Allocation | None:
        """Return what keeps a batch out, if anything does: a refusal, or (not refused) waiting."""
        batch = one.batch
        if not batch.request:
            return None
        if batch.request not in self._allocated and not one.reserved:
            if not 0 < batch.total <= self.capacity:
                return Allocation(refused=True)
            if self.capacity - sum(self._reserved.values()) < batch.total:
                return Allocation(refused=now >= one.until)
            self._reserved[batch.request] = batch.total
            one.reserved = True
        if len(self._allocated.get(batch.request, ())) + len(batch.keys) > batch.total:
            self._roll_back(batch.request)
            return Allocation(refused=True)
        return None

    def _roll_back(self, request: str) -> None:
        for key in self._allocated.get(request, ()):
            self._drop(key)
        self._forget(request)

    def _forget(self, request: str) -> None:
        self._allocated.pop(request, None)
        self._reserved.pop(request, None)

    # -- reads

    def has(self, key: str) -> bool:
        """Return whether a chunk is in the buffer."""
        return key in self.held

    def take(self, key: str, now: float) -> tuple[Page, ...] | None:
        """Return what a chunk holds (None: nothing was written yet) and remove one reference."""
        pages = self.held[key].pages
        self._drop(key)
        self.tick(now)
        return pages

    def _drop(self, key: str) -> None:
        held = self.held.get(key)
        if held is None:
            return
        held.references -= 1
        if held.references < 1:
            del self.held[key]
