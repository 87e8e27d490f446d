"""LMCache as a process of its own (multi-process mode): both engines share its store; a notice tells when it has the KV.

Source: LMCache 0.5.6, `examples/disagg_prefill_mp`. The legs are those of `shared`, but the prefill engine answers before its KV
is stored. Each of its ranks then posts `request_store_finished` with the engine's internal id, in which ours is found again.
"""

from __future__ import annotations

from pdproxy.transfer.contract import Contract, Dispatch
from pdproxy.transfer.shared import decode, handle, prefill


def _of_each_rank(_dispatch: Dispatch) -> int | None:
    return None


LMCACHE_MP = Contract(
    name="lmcache-mp", prefill=prefill, handle=handle, decode=decode, notices=_of_each_rank, needs_leg_id=True
)
