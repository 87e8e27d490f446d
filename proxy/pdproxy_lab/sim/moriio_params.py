"""What MoRIIO reads of a request: where the other engine is, and what kills an engine. Pure.

Source: vLLM 0.32.0, `moriio_common.py` (`MoRIIOConnectorMetadata.add_new_req`,
`parse_moriio_zmq_address`) and `moriio_connector.py` (`update_state_after_alloc`,
`_release_write_prefill_blocks`). `remote_hosts` (ranks of one engine on several machines) is not
read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pdproxy_lab.sim.request import EngineDeadError

_PREFILL = re.compile(r"___prefill_addr_(.+?)___decode_addr_")
_DECODE = re.compile(r"___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$")
_UNREADABLE = (KeyError, TypeError, ValueError)


class MessageAddress(msgspec.Struct, frozen=True):
    """Where another engine takes messages."""

    host: str
    port: int


def prefill_in(request_id: str) -> MessageAddress | None:
    """Return the prefill engine that a request's id names.

    Raises:
        ValueError: its address has another form.
    """
    return _place(_PREFILL.search(request_id))


def peer(
    request_id: str, params: dict[str, Any], *, decode: bool = False, ranked: bool = False
) -> MessageAddress:
    """Return the prefill engine of a request, or with `decode` its decode engine, as vLLM's
    scheduler gives it to its workers.

    `ranked`: the place of the data-parallel rank that the parameters name, as D's ranks calculate
    it.

    Raises:
        EngineDeadError: a parameter is missing, or is no number where one is needed; the core dies
            of it.
    """
    try:
        for name in ("transfer_id", "remote_block_ids", "remote_engine_id"):
            params[name]
        found = _place((_DECODE if decode else _PREFILL).search(request_id))
        if found is None:
            int(params["remote_handshake_port"])
            found = MessageAddress(
                str(params["remote_host"] or _none()), int(params["remote_notify_port"])
            )
        int(params.get("remote_dp_size_local", params.get("remote_dp_size", 1)))
        size = int(params.get("remote_tp_size") or params.get("tp_size") or 0)
        return (
            MessageAddress(found.host, found.port + int(params.get("remote_dp_rank", 0)) * size)
            if ranked
            else found
        )
    except _UNREADABLE as error:
        raise EngineDeadError from error


def reported_to(request_id: str, params: dict[str, Any]) -> MessageAddress | None:
    """WRITE: return the prefill engine to which D reports its blocks; None: D is not the one that
    reports, and nobody does.

    Raises:
        EngineDeadError: nothing names it, or a parameter is no number where one is needed.
    """
    rank, leader = params.get("remote_dp_rank", 0), params.get("is_request_leader")
    try:
        int(params.get("remote_dp_size", 1) or 1)
        if leader is None:
            leader = rank == 0 or not params.get("remote_dp_rank_override")
        if not leader:
            return None
        found = prefill_in(request_id)
        if found is None:
            found = MessageAddress(
                params.get("remote_host") or _none(),
                int(params.get("remote_notify_port") or 0) or _none(),
            )
        local = _number(params.get("remote_dp_size_local"))
        return MessageAddress(found.host, found.port + (rank % local if local else rank))
    except _UNREADABLE as error:
        raise EngineDeadError from error


def released_at(request_id: str, params: dict[str, Any]) -> MessageAddress | None:
    """WRITE: return the prefill engine to which D reports that it drops a request; None: nothing
    names it.

    Raises:
        EngineDeadError: a parameter is no number where one is needed.
    """
    host, port = params.get("remote_host"), params.get("remote_notify_port")
    if host is None or port is None:
        try:
            found = prefill_in(request_id)
        except ValueError:
            return None
        if found is None:
            return None
        host, port = found.host, found.port
    try:
        return MessageAddress(str(host), int(port) + params.get("remote_dp_rank", 0))
    except _UNREADABLE as error:
        raise EngineDeadError from error


def _place(match: re.Match[str] | None) -> MessageAddress | None:
    if match is None:
        return None
    parts = dict(segment.partition(":")[::2] for segment in match[1].split(","))
    try:
        int(parts["handshake"])
        return MessageAddress(parts["host"], int(parts["notify"]))
    except KeyError as error:
        raise ValueError(match[1]) from error


def _none() -> Any:
    raise ValueError


def _number(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0
