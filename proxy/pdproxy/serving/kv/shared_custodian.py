"""Custody of one of several workers: what must be known to release a handle is in memory that outlives this process.

If this worker is killed, the parent reads its records, and another worker becomes responsible for the handles: it releases them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from pdproxy.kit.shared_records import Area
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody, End
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.transfer.contract import Contract, Handle, LegRequest, no_notices
from pdproxy.wire.engine import PrefillAnswer

logger = logging.getLogger("pdproxy.kv")

UNITS = 16_384
"""Units of a worker's area, 8 MiB. A handle has some hundred bytes, and 6 per block of its prompt."""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """What another process needs to have a handle released: neither the prompt's ids nor its first token, and no counts.

    The first four: of the handle. `decode`: the engine that KV is pushed to, if it is pushed. `pool`: the number of its pool.
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


# For each request: a method of the base class as a function of this module takes half the time of `super()`.
_take, _ended = Custodian.take, Custodian.ended


class SharedCustodian(Custodian):
    """A `Custodian` of one of several workers. `area`: for the records of all its pools; `pool`: the number of this one."""

    def __init__(self, contract: Contract, *arguments: Any, area: Area, pool: int = 0, **options: Any) -> None:
        super().__init__(contract, *arguments, **options)
        self._awaits_notices = contract.notices is not no_notices and not contract.holder.late_kv_may_be_read
        """Whether KV must not be read before all its notices have come."""
        self._area = area
        self._pool = pool
        self._places: dict[Custody, int] = {}

    def take(self, handle: Handle, leg: PrefillRecord) -> Custody:
        """See `Custodian`."""
        custody = _take(self, handle, leg)
        if not self._awaits_notices:
            return self._noted(custody)
        # In this turn of the event loop the custody gets its wait for notices.
        asyncio.get_running_loop().call_soon(self._note_written, custody)
        return custody

    def _note_written(self, custody: Custody) -> None:
        """Note a handle once all notices have come: another worker does not know how many of them this one had."""
        expected = custody.expected
        if expected is None or expected.done.done():
            self._noted(custody)
        else:
            expected.done.add_done_callback(lambda _: self._noted(custody))

    def promise(self, handle: Handle, leg: PrefillRecord) -> Custody:
        """See `Custodian`."""
        return self._noted(super().promise(handle, leg))

    def ended(self, custody: Custody, how: End) -> None:
        """See `Custodian`."""
        place = self._places.pop(custody, None)
        if place is not None:
            self._area.drop(place)
        _ended(self, custody, how)

    def adopt(self, records: list[bytes]) -> None:
        """Release the handles of a worker that has ended, those of this pool. Nobody else asks for their KV."""
        found = [one for one in map(_decode, records) if one.pool == self._pool]
        for one in found:
            handle = Handle(one.params, None, one.prompt_tokens, one.remote_request_id, release=one.release)
            leg = PrefillRecord(one.prefill, one.model, one.authorization, _not_read, one.decode)
            custody = self._noted(super().take(handle, leg))
            custody.was_asked = True  # a decode engine may have been sent it
            custody.release()
        if found:
            logger.warning("%d handles of a worker that has ended are released", len(found))

    def _noted(self, custody: Custody) -> Custody:
        if custody.state is not None:
            handle = custody.handle
            # As a tuple: it has the bytes of a `_Record`, which would cost more than they do.
            place = self._area.put(
                _encode(
                    (
                        handle.params,
                        handle.prompt_tokens,
                        handle.remote_request_id,
                        handle.release,
                        custody.prefill,
                        custody.decode,
                        custody.model,
                        custody.authorization,
                        self._pool,
                    )
                )
            )
            if place is not None:
                self._places[custody] = place
        return custody


def _not_read(answer: PrefillAnswer) -> str:
    return "the answer went to a worker that has ended"
