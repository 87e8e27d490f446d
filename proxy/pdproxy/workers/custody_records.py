"""Records of one worker's live handles: what must be known to release a handle is in memory that
outlives this process.

If this worker is killed, the parent reads its records, and another worker becomes responsible for
the handles: it releases them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.transfer.contract import Contract, Handle, LegRequest, no_notices
from pdproxy.workers.records import Area

logger = logging.getLogger("pdproxy.kv")

UNITS = 16_384
"""Units of a worker's area, 8 MiB. A handle has some hundred bytes, and 6 per block of its
prompt.
"""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to have a handle released: neither the prompt's ids nor its first
    token, and no counts.

    The first four: of the handle. `decode`: the engine that KV is pushed to, if it is pushed.
    `pool`: the number of its pool.
    """

    params: bytes
    prompt_tokens: int
    remote_request_id: str
    release: LegRequest | None
    prefill: str
    decode: str | None
    model: str | None
    authorization: tuple[tuple[bytes, bytes], ...]
    pool: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class _Recorded(OrderedSet[Custody]):
    """Live custodies, each with the place of its record. `area`: for the records of all pools;
    `pool`: the number of this one.
    """

    def __init__(self, area: Area, pool: int) -> None:
        super().__init__()
        self._area = area
        self._pool = pool

    def add(self, member: Custody) -> None:
        """Add a custody and write its record, if there is space for it."""
        handle = member.handle
        assert isinstance(handle, Handle)
        # As a tuple: it has the bytes of a `_Record`, which would cost more than they do.
        self[member] = self._area.put(
            _encode(
                (
                    handle.params,
                    handle.prompt_tokens,
                    handle.remote_request_id,
                    handle.release,
                    member.prefill,
                    member.decode,
                    member.model,
                    member.authorization,
                    self._pool,
                )
            )
        )

    def discard(self, member: Custody) -> None:
        """Forget a custody and its record."""
        place = self.pop(member, None)
        if place is not None:
            self._area.drop(place)


class _RecordedLate(_Recorded):
    """Live custodies of KV that must not be read before all its notices have come.

    A record is written behind them: another worker does not know how many of them this one had.
    """

    def add(self, member: Custody) -> None:
        """Add a custody. Its record is written once all its notices have come; now if nobody has
        made the KV yet.
        """
        if member.promised:
            super().add(member)
            return
        self[member] = None
        # In this turn of the event loop the custody gets its wait for notices.
        asyncio.get_running_loop().call_soon(self._await_notices, member)

    def note(self, member: Custody) -> None:
        """Write the record of a live custody that has none yet."""
        if member in self and self[member] is None:
            super().add(member)

    def _await_notices(self, member: Custody) -> None:
        expected = member.expected
        if expected is None or expected.done.done():
            self.note(member)
        else:
            expected.done.add_done_callback(lambda _: self.note(member))


def recorded(contract: Contract, area: Area, pool: int) -> OrderedSet[Custody]:
    """Return what holds the live custodies of the pool with number `pool`, and records them in
    `area`.
    """
    awaits_notices = contract.notices is not no_notices and not contract.holder.late_kv_may_be_read
    return (_RecordedLate if awaits_notices else _Recorded)(area, pool)


def adopt(
    custodian: Custodian,
    live: OrderedSet[Custody],
    engines: Mapping[str, Engine],
    records: list[bytes],
    pool: int,
) -> None:
    """Release the handles of a worker that has ended, those of this pool. Nobody else asks for
    their KV. `custodian`: takes them, and holds them in `live`.
    """
    found = [one for one in map(_decode, records) if one.pool == pool]
    for one in found:
        handle = Handle(
            one.params, None, one.prompt_tokens, one.remote_request_id, release=one.release
        )
        engine = engines.get(one.prefill)
        run = None if engine is None else engine.in_ledger.run_number
        leg = PrefillRecord(
            one.prefill, one.model, one.authorization, _not_read, one.decode, run=run
        )
        custody = custodian.take(handle, leg)
        if isinstance(live, _RecordedLate):
            live.note(custody)  # all its notices have come
        custody.was_asked = True  # a decode engine may have been sent it
        custody.release()
    if found:
        logger.warning("%d handles of a worker that has ended are released", len(found))


def _not_read(_: bytes) -> str:
    return "the answer went to a worker that has ended"
