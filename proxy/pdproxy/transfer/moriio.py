"""MoRIIO (AMD GPUs): D reads P's blocks (READ), or P writes into D's (WRITE). Engines register with
the proxy, with their mode.

Source: vLLM 0.32.0 `moriio/*.py` and its example proxy. Both legs have one `X-Request-Id`, which
names both engines (`transfer.peer_ids`), and one `transfer_id`. What follows from the source:

- P keeps blocks only for a request that ends by length: stop lists are emptied, and where EOS can't
  be masked, P is asked first. It keeps them until
  D reports the end of its reads (READ), until its own writes are done (WRITE), or for
  `defer_timeout` (60 s).
- READ: D's leg has P's answer unchanged. WRITE: D's leg names the transfer; once D has blocks for
  it, D reports them to P. P may have been asked before or after that: with P first, P answers at
  once and writes later. A D that waits keeps its blocks until P has written; no deadline of its own
  ends that. If its request is closed before, it never frees them: D forgets the transfer at once,
  and P's report that it has written finds nothing. So such a leg is closed once P must have
  written.
- WRITE: where P has more blocks than D, it writes nothing and reports that to nobody: D waits on.
- A decode engine that refuses or drops a request before it is scheduled reports to P that the
  blocks may be freed: a completion with `max_tokens: 0` and P's answer releases them. It also
  reports that when the client of a whole answer leaves, whatever the request does then. So this is
  used in READ mode only: in WRITE mode P would then never write, and a D that waits would keep its
  blocks for ever. There, legs do not name P's host, which refusals need; `defer_timeout` frees what
  no D waits for.
- READ: a P that was restarted since its answer is not recognized by D: it reads other KV, and
  answers wrongly. NIXL's engine ids are new at each start; MoRIIO's are `IP:port`.
- READ: a decode engine takes any request's whole prompt as transferred, also that of a request
  without `kv_transfer_params`, and then answers from whatever its memory holds, silently. So no
  decode engine may serve a request alone. Prefill engines may: they must be `kv_producer`, since
  any other role counts as a consumer.
- The rank of P's leg is pinned by a header, because D must know it. The rank of D's leg is the
  engine's choice. In WRITE mode, `remote_dp_rank_override` must not be sent: with it, a D on
  another rank than P's never reports its blocks.
- The addresses are found in the id only if it ends with the 32 hex digits. Responses have
  `<id>_0` there.
- Ranks of one engine on several machines are not supported: a registration names one machine.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import (
    decode_fields,
    prefill_fields,
    until_length,
    with_ids,
)
from pdproxy.transfer.contract import (
    ALL_ROUTES,
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    LegRequest,
    PushedToDecode,
    leg,
    raw,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import answered, holds_blocks, promised
from pdproxy.transfer.peer_ids import addressed_id, fits_into_id, minted_part
from pdproxy.transfer.peers import Peer, PeerSource
from pdproxy.transfer.refusal import refusal_released, release_body
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.registrations import Registration
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

_ADDRESS = re.compile(r"host:[0-9A-Za-z._:-]+,handshake:[0-9]{1,5},notify:[0-9]{1,5}")
WRITE = "WRITE"


class _Params(msgspec.Struct, frozen=True):
    """The fields of P's answer that a decode engine needs. Ports are text where the engine's
    configuration has them as text.
    """

    do_remote_prefill: bool
    transfer_id: str
    remote_engine_id: str
    remote_block_ids: msgspec.Raw
    remote_host: str
    remote_handshake_port: int | str
    remote_notify_port: int | str
    remote_dp_rank: int = 0


_params_decoder = msgspec.json.Decoder(_Params)


def registered(registration: Registration) -> tuple[Peer, ...] | str:
    """Return the ranks of an engine, or why its registration can't be used."""
    address, mode = registration.zmq_address, registration.transfer_mode
    if mode is None:
        return "registers without a transfer_mode: its kv_connector is not MoRIIOConnector"
    if not _ADDRESS.fullmatch(address) or not fits_into_id(address):
        return f"registers the zmq_address {address}: expected host:IP,handshake:PORT,notify:PORT"
    ranks, tp_size = registration.dp_size or 1, registration.tp_size or 1
    host = address.partition(":")[2].partition(",")[0]
    return tuple(
        Peer(rank, ranks, host=host, address=address, tp_size=tp_size, mode=mode)
        for rank in range(ranks)
    )


def transfer_id(dispatch: Dispatch) -> str:
    """Return the name by which both engines know one transfer."""
    assert dispatch.leg_id is not None
    return f"tx-{minted_part(dispatch.leg_id)}"


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: its one token ends it by length, and it names the transfer and the
    sizes of D.
    """
    peer, other = _peers(dispatch)
    fields = until_length(prefill_fields(parsed, prompt, dispatch), parsed.route.form)
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        # P's core dies in WRITE mode without these two.
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": transfer_id(dispatch),
        "remote_dp_size": other.ranks,
        "remote_tp_size": other.tp_size,
    }
    fields["kv_transfer_params"] = raw(msgspec.json.encode(params))
    if (ids := dispatch.prefill_ids) is not None:
        with_ids(fields, parsed.route, ids)
    return leg(parsed, fields, peer.headers)


def handle(_parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
    """Return the handle in a prefill answer, or why there is none that may be used."""
    params_json = bytes(answer.kv_transfer_params)
    if params_json == b"null":
        return (
            "the answer has no kv_transfer_params: is the engine started with a "
            "--kv-transfer-config of MoRIIOConnector,"
            " with kv_role kv_producer?"
        )
    try:
        params = _params_decoder.decode(params_json)
    except UNREADABLE as error:
        return f"kv_transfer_params are incomplete: {error}"
    peer, _ = _peers(dispatch)
    if not params.do_remote_prefill or params.transfer_id != transfer_id(dispatch):
        return "kv_transfer_params are those of another transfer"
    if params.remote_dp_rank != peer.rank:
        return f"data-parallel rank {params.remote_dp_rank} served a leg to rank {peer.rank}"
    if not params.remote_host or not holds_blocks(bytes(params.remote_block_ids)):
        return "kv_transfer_params hold no blocks"
    return answered(answer, b"" if peer.mode == WRITE else params_json, params.transfer_id)


def promise(_parsed: Parsed, dispatch: Dispatch) -> Handle | None:
    """Return what a decode engine is sent while the prefill engine works, None where it reads: then
    P's answer comes first.
    """
    if _peers(dispatch)[0].mode != WRITE:
        return None
    return promised(dispatch, b"", transfer_id(dispatch))


def release(model: str | None, given: Handle) -> bytes | None:
    """Return the completion whose refusal frees P's blocks, None in WRITE mode: a decode engine may
    wait for them.

    The mode is that of P's answer: a decode engine that reads is sent the answer itself.
    """
    return None if _writes(given) else release_body(model, given)


def _writes(given: Handle) -> bool:
    return given.params == b""


def decode(parsed: Parsed, prompt: Prompt, given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: P's answer unchanged (READ), or what names the transfer (WRITE), and
    the prompt's ids.
    """
    peer, _ = _peers(dispatch)
    fields = decode_fields(parsed, prompt)
    params = _to_writers_peer(peer, dispatch) if peer.mode == WRITE else given.params
    ids = None
    if given.token_ids is not None and not prompt.media:
        if parsed.route is not Route.COMPLETIONS:
            ids = given.token_ids
        elif dispatch.ids is not None:
            with_ids(fields, parsed.route, TokenIds(given.token_ids, given.prompt_tokens))
    fields["kv_transfer_params"] = raw(params)
    return leg(parsed, fields, ids=ids)


def _to_writers_peer(peer: Peer, dispatch: Dispatch) -> bytes:
    # Without `remote_host`: a decode engine whose client leaves before a whole answer would report
    # that to P, and P would then never write.
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": transfer_id(dispatch),
        "remote_dp_size": peer.ranks,
        "remote_dp_rank": peer.rank,
        "remote_tp_size": peer.tp_size,
    }
    return msgspec.json.encode(params)


def _peers(dispatch: Dispatch) -> tuple[Peer, Peer]:
    assert dispatch.prefill_peer is not None
    assert dispatch.decode_peer is not None
    return dispatch.prefill_peer, dispatch.decode_peer


NAME = "moriio"
CAPABILITIES = Capabilities(
    takes_ids=True,
    routes=ALL_ROUTES - {Route.RESPONSES},
    media=True,
    needs_length=True,
    orders=("concurrent", "sequential"),
    peers_from=PeerSource.REGISTRATION,
    alone_on=("aggregated", "prefill"),
    whole_on_prefill=True,
    short_prompts=True,
    mixed_parallel_sizes=True,
)
MORIIO = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    needs_leg_id=True,
    leg_id=addressed_id,
    decode_has_leg_id=True,
    promise=promise,
    holder=PushedToDecode(release, refusal_released, handshakes=False, loses=_writes),
)
ENTRY = Entry.of(
    MORIIO, kv_connectors=("MoRIIOConnector",), registered=registered, registration_port=36367
)
