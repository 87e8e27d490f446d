"""LMCache's prefill-decode transfer (contract `lmcache-pd`) as in its 0.5.6: P pushes chunks into
D's buffer. Pure.

Owns what P has pushed, the receivers that it waits for, and D's buffers, one per rank. As in real
ones, these kill the engine:

- `disagg_spec` without one of its keys, or with fewer ports than P has ranks;
- a request to P without a `disagg_spec`, unless `lmcache.skip_save` is in the parameters (`async`,
  the default; `sync` just does not push it);
- `ret_first_tok` in the parameters of a request that ends before its first token: an abort of P's
  leg.

As with the real one, P's whole engine waits without a limit for an unknown D that does not listen,
and with `sync` for space in D's buffer. A notice is sent once all is written. If a write fails or
space is refused, none is sent, and P's answer is the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.chunks import Chunk, chunks_of, read, write
from pdproxy_lab.sim.connector import Connector, ProxyNotice
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import EMPTY, BlockPool
from pdproxy_lab.sim.pd_buffer import Allocation, ChunkBatch, PDBuffer
from pdproxy_lab.sim.request import EngineDeadError


class ReceivingRank(msgspec.Struct, frozen=True):
    """One rank of a decode engine, with the address that P's request names."""

    host: str
    init_port: int
    alloc_port: int
    rank: int


class ReceiverHandshake(msgspec.Struct, frozen=True):
    """Ask for the engine's id at the init port, until one listens. The answer goes to
    `LMCachePD.receiver_found`.
    """

    receiver: ReceivingRank


class Offer(msgspec.Struct, frozen=True):
    """Ask for space at the alloc port, until there is an answer. It goes to `LMCachePD.offered`."""

    receiver: ReceivingRank
    batch: ChunkBatch


class Write(msgspec.Struct, frozen=True):
    """Write chunks into the memory of the engine of the handshake. The result goes to
    `LMCachePD.written`.
    """

    receiver: ReceivingRank
    engine_id: str
    batch: ChunkBatch
    keys: tuple[str, ...]
    pages: tuple[Any, ...]
    tokens: int


class Cancel(msgspec.Struct, frozen=True):
    """Cancel the push of a request's chunks. There is no answer."""

    receiver: ReceivingRank
    request: str
    keys: tuple[str, ...]


class _Sending(msgspec.Struct):
    """A request of P."""

    spec: dict[str, Any] | None
    saved: int = 0
    transferred: int = 0


class _Progress(msgspec.Struct):
    """What one rank has pushed of a request (`async`)."""

    done: int = 0
    last: bool = False
    keys: list[str] = []


class LMCachePD(Connector):
    """The connector of one engine, P or D by its role."""

    def __init__(self, facts: SimFacts, pool: BlockPool) -> None:
        super().__init__()
        self._facts, self._config, self._pool = facts, facts.lmcache, pool
        self._sync = facts.lmcache.pd_backend_mode == "sync"
        self.buffers = [
            PDBuffer(facts.lmcache, facts.pd_buffer_chunks) for _ in range(facts.pd_ranks)
        ]
        """D's, one per rank that pushes."""
        self._sending: dict[str, _Sending] = {}
        self._known: dict[tuple[str, int], str] = {}
        self._finding: dict[ReceivingRank, list[ChunkBatch]] = {}
        self._offers = 0
        self._progress: dict[tuple[ReceivingRank, str], _Progress] = {}
        self._found: dict[str, list[Chunk]] = {}
        self._now = 0.0

    @property
    def blocked(self) -> bool:
        """Whether a worker waits for a decode engine."""
        return bool(self._finding) or (self._sync and self._offers > 0)

    def tick(self, now: float) -> None:
        """Allocate space that has become free, and refuse pushes that have waited too long."""
        self._now = now
        for buffer in self.buffers:
            buffer.tick(now)

    def next_timer(self) -> float | None:
        """Return when the next push has waited too long for space."""
        times = [time for buffer in self.buffers if (time := buffer.next_timer()) is not None]
        return min(times, default=None)

    # -- any request

    def allocated(self, one: ActiveRequest, new_blocks: int, tokens: int) -> bool:
        """Read the request's receiver.

        Raises:
            EngineDeadError: keys are missing, or are of the wrong type.
        """
        spec = None
        if one.params is not None and "disagg_spec" in one.params:
            spec = one.params["disagg_spec"]
            keys = ("receiver_host", "receiver_init_port", "req_id", "receiver_alloc_port")
            if not isinstance(spec, dict) or any(key not in spec for key in keys):
                raise EngineDeadError
            if not isinstance(spec["receiver_host"], str):
                raise EngineDeadError
        self._sending[one.request.id] = _Sending(spec)
        return True

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Put the first token into the answer if the request has `ret_first_tok`, whatever its
        value.

        Raises:
            EngineDeadError: there is none.
        """
        self._sending.pop(one.request.id, None)
        self._found.pop(one.request.id, None)
        if one.params is None or "ret_first_tok" not in one.params:
            return False, None
        if not one.generated:
            raise EngineDeadError
        return False, {"first_tok": one.generated[0]}

    # -- P

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """Push what the step has completed.

        Raises:
            EngineDeadError: the request names no receiver.
        """
        self._now = now
        sending = self._sending.get(one.request.id)
        if self._facts.role == "decode" or self._config.degraded or sending is None:
            return
        size = self._config.chunk_size
        if sending.spec is None and self._need_not_be_saved(one, sending):
            return
        last = one.computed >= one.prompt
        upto = (
            one.computed
            if last and not self._config.discard_partial_chunks
            else one.computed // size * size
        )
        # Workers in processes of their own get a fresh copy of the request's state with each step.
        skip = (
            min(sending.saved, sending.transferred) if self._facts.tensor_parallel_size == 1 else 0
        )
        if sending.spec is None:
            skip = sending.saved
        sending.saved = upto
        if skip == upto:
            return
        if sending.spec is None:
            if self._sync:
                return
            raise EngineDeadError
        sending.transferred = upto
        chunks = [chunk for chunk in self._chunks(one, upto) if chunk.end > skip]
        batch = ChunkBatch(
            str(sending.spec["req_id"]),
            tuple(chunk.key for chunk in chunks),
            tuple(read(one, chunk, self._pool) for chunk in chunks),
            -(-one.prompt // size),
            last,
        )
        for rank in range(len(self.buffers)):
            self._push(self._receiver(sending.spec, rank), batch)

    def _need_not_be_saved(self, one: ActiveRequest, sending: _Sending) -> bool:
        size = self._config.chunk_size
        unfilled = sending.saved > 0 and one.computed < (sending.saved // size + 1) * size
        return unfilled or bool(one.generated) or bool((one.params or {}).get("lmcache.skip_save"))

    @staticmethod
    def _receiver(spec: dict[str, Any], rank: int) -> ReceivingRank:
        try:
            init, alloc = spec["receiver_init_port"][rank], spec["receiver_alloc_port"][rank]
            return ReceivingRank(spec["receiver_host"], int(init), int(alloc), rank)
        except (TypeError, LookupError, ValueError) as error:
            raise EngineDeadError from error

    def _push(self, receiver: ReceivingRank, batch: ChunkBatch) -> None:
        if receiver in self._finding:
            self._finding[receiver].append(batch)
        elif (receiver.host, receiver.init_port) in self._known:
            self._offer(receiver, batch)
        else:
            self._finding[receiver] = [batch]
            self.outbox.append(ReceiverHandshake(receiver))

    def _offer(self, receiver: ReceivingRank, batch: ChunkBatch) -> None:
        self._offers += 1
        self.outbox.append(Offer(receiver, batch))

    def receiver_found(self, receiver: ReceivingRank, engine_id: str) -> None:
        """An engine listens there: push to it what has waited for it."""
        self._known[receiver.host, receiver.init_port] = engine_id
        for batch in self._finding.pop(receiver, []):
            self._offer(receiver, batch)

    def offered(self, offer: Offer, allocation: Allocation) -> None:
        """Write the chunks of a batch whose space was allocated."""
        receiver, batch = offer.receiver, offer.batch
        self._offers -= 1
        if allocation.refused:
            self._cancel(receiver, batch.request)
            return
        if not self._sync:
            self._of(receiver, batch).keys.extend(batch.keys)
        wanted = [
            (key, pages)
            for key, pages in zip(batch.keys, batch.pages, strict=True)
            if key not in allocation.present
        ]
        if not wanted:
            self._done(receiver, batch)
            return
        keys, pages = zip(*wanted, strict=True)
        tokens = len(keys) * self._config.chunk_size
        engine_id = self._known[receiver.host, receiver.init_port]
        self.outbox.append(Write(receiver, engine_id, batch, keys, pages, tokens))

    def written(self, write: Write, *, whole: bool) -> None:
        """Take the result of a write."""
        if whole:
            self._done(write.receiver, write.batch)
        elif not self._sync:
            self._cancel(write.receiver, write.batch.request)

    def _of(self, receiver: ReceivingRank, batch: ChunkBatch) -> _Progress:
        return self._progress.setdefault((receiver, batch.request), _Progress())

    def _done(self, receiver: ReceivingRank, batch: ChunkBatch) -> None:
        if self._sync:
            if batch.last:
                self._notify(receiver, batch.request)
            return
        progress = self._of(receiver, batch)
        progress.done += len(batch.keys)
        progress.last |= batch.last
        if progress.last and progress.done >= batch.total:
            del self._progress[receiver, batch.request]
            if batch.request:
                self._notify(receiver, batch.request)

    def _cancel(self, receiver: ReceivingRank, request: str) -> None:
        progress = self._progress.pop((receiver, request), None)
        if progress is not None and progress.keys:
            self.outbox.append(Cancel(receiver, request, tuple(progress.keys)))

    def _notify(self, receiver: ReceivingRank, request: str) -> None:
        kind = self._config.notice_type
        tag = {} if kind == "untagged" else {"type": kind}
        self.outbox.append(ProxyNotice({**tag, "req_id": request}, receiver.rank))

    # -- D

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens all ranks' buffers hold beyond those that are here; the last token
        is always computed.
        """
        if self._facts.role == "prefill" or self._config.degraded:
            return 0, False
        skip, found = self._config.skip_last_n_tokens, []
        for chunk in self._chunks(one, max(one.prompt - skip, 0)):
            if not all(buffer.has(chunk.key) for buffer in self.buffers):
                break
            found.append(chunk)
        self._found[one.request.id] = found
        hit = found[-1].end if found else 0
        return max(hit - one.computed - (hit == one.prompt), 0), False

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Take the chunks out of the buffers; chunks that this engine already has stay in the
        buffers.
        """
        size = self._config.chunk_size
        for chunk in self._found.pop(one.request.id, []):
            if chunk.start < one.computed // size * size:
                continue
            parts = [buffer.take(chunk.key, self._now) for buffer in self.buffers]
            if any(part is None for part in parts):
                count = -(-(chunk.end - chunk.start) // self._pool.block_size)
                write(one, chunk, [EMPTY] * count, self._pool)
            elif parts[0] is not None:
                write(one, chunk, parts[0], self._pool)

    # -- both

    def _chunks(self, one: ActiveRequest, upto: int) -> list[Chunk]:
        salt = (self._facts.model, self._facts.tensor_parallel_size)
        return list(chunks_of(one.keyed[:upto], self._config.chunk_size, salt))
