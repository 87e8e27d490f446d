"""Ids of legs that name both engines: by such an id each engine finds the other one.

Source: vLLM 0.23 `p2p_nccl_connector.py`, vLLM 0.32.0 `moriio_common.py`: both read the addresses
from the `X-Request-Id` by regular expressions. The engines know a transfer by the id, so both legs
have the same.
"""

from __future__ import annotations

from pdproxy.transfer.contract import Dispatch

_BOUNDARY = "___"


def addressed_id(minted: str, dispatch: Dispatch) -> str:
    """Return the id of both legs: the addresses of the engines, and 32 hex digits that no other
    dispatch has.

    Both peers must be known: engines that have not registered are not paired.
    """
    prefill, decode = dispatch.prefill_peer, dispatch.decode_peer
    assert prefill is not None
    assert decode is not None
    assert prefill.address is not None
    assert decode.address is not None
    return f"___prefill_addr_{prefill.address}___decode_addr_{decode.address}_{minted}"


def minted_part(leg_id: str) -> str:
    """Return the 32 hex digits of an id."""
    return leg_id[-32:]


def fits_into_id(address: str) -> bool:
    """Return whether an address can stand in such an id: engines look for the boundaries between
    its parts.
    """
    return _BOUNDARY not in address and not address.startswith("_") and not address.endswith("_")
