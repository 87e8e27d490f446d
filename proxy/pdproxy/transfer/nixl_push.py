"""NIXL, push: the prefill engine writes the KV into blocks that the decode engine has reserved,
while both are asked at once.

Source: vLLM 0.32.0 `nixl/push_scheduler.py`, `nixl/push_worker.py`. The decode engine registers its
blocks with the prefill engine, and the two find each other's request by `X-Request-Id`, without the
engine's own suffix: so both legs go to the same endpoint with an id of their own, made for each
dispatch. Two clients that use one id would get each other's KV. Responses name it in the body: see
`Parsed.named`.

The decode leg names the prefill engine's rank, which only that engine's answers show: until the
first one of its run, prompts are prefilled first. A decode engine that waits for KV keeps its
blocks until the KV comes. Nothing but its lease (30 s) frees KV of the prefill engine that no
decode engine waits for, and a decode engine's heartbeat does not renew that lease.
"""

from __future__ import annotations

import msgspec

from pdproxy.transfer import nixl
from pdproxy.transfer.contract import (
    ALL_ROUTES,
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    LegRequest,
    PushedToDecode,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import answered, promised
from pdproxy.transfer.peers import Peer, PeerSource
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt


class _Params(msgspec.Struct, frozen=True):
    """The fields of a prefill answer that a decode engine needs."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    pp_size: int = 1
    transfer_mode: str | None = None  # vLLM before 0.32.0 has none
    remote_prefill_cached_tokens: int | None = None


_params_decoder = msgspec.json.Decoder(_Params)


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: as for the pull, to one rank."""
    leg = nixl.prefill(parsed, prompt, dispatch)
    return msgspec.structs.replace(leg, headers=_headers(dispatch.prefill_peer))


def handle(_parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
    """Return what a decode engine is sent after a prefill answer, or why it can't be sent
    anything.
    """
    params = _params_of(answer)
    if isinstance(params, str):
        return params
    to_decode = _decode_params(_peer(params, dispatch), dispatch)
    return answered(
        answer, to_decode, dispatch.leg_id or "", cached_tokens=params.remote_prefill_cached_tokens
    )


def peer_in(answer: PrefillAnswer, dispatch: Dispatch) -> Peer | None:
    """Return where the prefill engine's rank is reached, by its answer."""
    params = _params_of(answer)
    return None if isinstance(params, str) else _peer(params, dispatch)


def promise(_parsed: Parsed, dispatch: Dispatch) -> Handle | None:
    """Return what a decode engine is sent while the prefill engine works, None if that engine's
    rank is not known yet.
    """
    peer = dispatch.prefill_peer
    if peer is None or peer.engine_id is None:
        return None
    return promised(dispatch, _decode_params(peer, dispatch), dispatch.leg_id or "")


def decode(parsed: Parsed, prompt: Prompt, given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request and where its KV comes from. It has ids if the
    prefill leg has the same.
    """
    leg = nixl.decode(parsed, prompt, given, dispatch)
    return msgspec.structs.replace(leg, headers=_headers(dispatch.decode_peer))


def _params_of(answer: PrefillAnswer) -> _Params | str:
    params_json = bytes(answer.kv_transfer_params)
    if params_json == b"null":
        return (
            "the answer has no kv_transfer_params: is the engine started with a "
            "--kv-transfer-config of NixlPushConnector?"
        )
    try:
        params = _params_decoder.decode(params_json)
    except UNREADABLE as error:
        return f"kv_transfer_params are incomplete: {error}"
    if params.transfer_mode == "pull":
        return (
            "kv_transfer_params are not those of a push: the engine runs NixlConnector, which is "
            "connector nixl"
        )
    return params


def _peer(params: _Params, dispatch: Dispatch) -> Peer:
    known = dispatch.prefill_peer or Peer()
    return Peer(
        known.rank,
        known.ranks,
        engine_id=params.remote_engine_id,
        host=params.remote_host,
        port=params.remote_port,
        tp_size=params.tp_size,
        pp_size=params.pp_size,
    )


def _decode_params(peer: Peer, dispatch: Dispatch) -> bytes:
    """Return a decode engine's params. Without any of these fields its core dies, or the request
    waits without end.
    """
    return msgspec.json.encode(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": peer.engine_id,
            "remote_host": peer.host,
            "remote_port": peer.port,
            "tp_size": peer.tp_size,
            "pp_size": peer.pp_size,
            "remote_request_id": dispatch.leg_id,
        }
    )


def _headers(peer: Peer | None) -> tuple[tuple[bytes, bytes], ...]:
    return () if peer is None else peer.headers


NAME = "nixl-push"
CAPABILITIES = Capabilities(
    takes_ids=True,
    routes=ALL_ROUTES,
    media=True,
    orders=("concurrent", "sequential"),
    peers_from=PeerSource.ANSWERS,
    mixed_parallel_sizes=True,
    names_host=True,
    any_role=True,
    whole_on_prefill=True,
)
CONTRACT = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    needs_leg_id=True,
    decode_has_leg_id=True,
    promise=promise,
    peer_in=peer_in,
    holder=PushedToDecode(lease=nixl.LEASE),
    at_host=nixl.at_host,
)


ENTRY = Entry.of(
    CONTRACT, kv_connectors=("NixlPushConnector",), signs=nixl.signs("push", first_version="0.20")
)
