"""LMCache as a separate process (multi-process mode): both engines share its store; notices report
that it has the KV.

Source: LMCache 0.5.6, `examples/disagg_prefill_mp`. The legs are those of `shared`, but the prefill
engine answers before its KV is stored. Each of its ranks then posts `request_store_finished` with
the engine's internal id, which contains ours.
"""

from __future__ import annotations

from pdproxy.transfer.contract import ALL_ROUTES, Capabilities, Channel, Contract, Dispatch
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.shared import decode, handle, prefill
from pdproxy.transfer.signs import ContractSigns


def _from_each_rank(_dispatch: Dispatch) -> int | None:
    return None


NAME = "lmcache-mp"
CAPABILITIES = Capabilities(
    notices_over=Channel.HTTP, any_role=True, whole_on_prefill=True, routes=ALL_ROUTES, media=True
)
LMCACHE_MP = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    needs_leg_id=True,
    notices=_from_each_rank,
)
ENTRY = Entry.of(
    LMCACHE_MP, kv_connectors=("LMCacheMPConnector",), signs=ContractSigns(metrics=("lmcache:",))
)
