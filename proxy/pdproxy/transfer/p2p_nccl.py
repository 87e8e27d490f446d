"""P2P NCCL: P sends each layer's KV straight to D, into buffers by the request's id. In vLLM up to
0.23.

Source: vLLM `p2p/p2p_nccl_connector.py`, `p2p/p2p_nccl_engine.py`, and its example proxy. Engines
register with the proxy. Both legs have one `X-Request-Id`, which names both engines
(`transfer.peer_ids`), and no `kv_transfer_params`. P answers after it has sent the KV. What follows
from the source:

- Since 0.14, vLLM adds a random suffix to ids, another one in each engine. Engines must run with
  `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`; else D never finds the KV.
- D's whole engine waits without a limit for KV that does not come. So D is asked only after P has
  answered. If P dies while its last layer is on the way, nothing but a restart frees D.
- P's whole engine waits without a limit for a D that has died.
- A request whose id names no engines kills P as well as D, and a second token kills P: neither can
  serve a request alone. D does not even need a notable prompt: only one of a single token moves no
  KV.
- D drops the KV of a request when the request ends, in whatever way, also while it waits. KV of a
  request that D never got stays there for ever: D is then sent a request of one prompt token, on
  the same route and with the same id. D loads no KV for it, so it can't wait, and drops what it has
  under that id. What a P has sent before it failed in the middle is not released: there is no
  answer of P that shows it.
- With `send_type: GET`, D fetches the KV from P, which drops the oldest when its buffer is full. D
  then computes with whatever its memory holds, silently: PUT_ASYNC, the default, or PUT must be
  used.
- P and D are paired rank by rank: equal tensor-parallel sizes, and no data parallelism behind one
  URL.
"""

from __future__ import annotations

import re

from msgspec import structs

from pdproxy.transfer.bodies import decode_fields, prefill_fields
from pdproxy.transfer.contract import (
    OPENAI_ROUTES,
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    HeldByDecode,
    LegRequest,
    encode,
    leg,
    raw,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import unclaimed
from pdproxy.transfer.peer_ids import addressed_id, fits_into_id
from pdproxy.transfer.peers import Peer, PeerSource
from pdproxy.transfer.signs import ContractSigns
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.registrations import Registration
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

_ADDRESS = re.compile(r"[0-9A-Za-z._:-]+:[0-9]{1,5}")
_ONE_TOKEN_CHAT = raw(b'[{"role":"user","content":"x"}]')


def registered(registration: Registration) -> tuple[Peer, ...] | str:
    """Return the only rank of an engine, or why its registration can't be used."""
    address = registration.zmq_address
    if registration.transfer_mode is not None:
        return "registers with a transfer_mode: its kv_connector is not P2pNcclConnector"
    if not _ADDRESS.fullmatch(address) or not fits_into_id(address):
        return f"registers the zmq_address {address}: expected host:port"
    return (Peer(host=address.rpartition(":")[0], address=address),)


def prefill(parsed: Parsed, prompt: Prompt, _dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: the client's request with one token."""
    return leg(parsed, prefill_fields(parsed, prompt))


def handle(parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
    """Return a handle without `params`, and with the request that makes D drop the KV."""
    assert dispatch.leg_id is not None
    fields: Fields = {"max_tokens": raw(b"1"), "stream": raw(b"false")}
    if "model" in parsed.fields:
        fields["model"] = parsed.fields["model"]
    route = parsed.route
    if route is Route.COMPLETIONS:
        fields["prompt"] = raw(b"[0]")
    else:
        route = Route.CHAT  # which a message is to the engine: its id is that of a chat
        # No chat has a prompt of one token: the engine cuts it.
        fields |= {"messages": _ONE_TOKEN_CHAT, "truncate_prompt_tokens": raw(b"1")}
    release = LegRequest(route, encode(fields), ((b"x-request-id", dispatch.leg_id.encode()),))
    return structs.replace(unclaimed(answer, answer.token_ids(), dispatch.leg_id), release=release)


def decode(parsed: Parsed, prompt: Prompt, _given: Handle, _dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request."""
    return leg(parsed, decode_fields(parsed, prompt))


def release_leg(_model: str | None, given: Handle) -> LegRequest:
    """Return the request that makes D drop the KV: a prompt of one token with the same id."""
    assert given.release is not None
    return given.release


NAME = "p2p-nccl"
CAPABILITIES = Capabilities(
    peers_from=PeerSource.REGISTRATION,
    alone_on=("aggregated",),
    short_prompts=True,
    routes=OPENAI_ROUTES | {Route.MESSAGES},
    media=True,
)
P2P_NCCL = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    needs_leg_id=True,
    leg_id=addressed_id,
    decode_has_leg_id=True,
    holder=HeldByDecode(release_leg, drops_aborted=True),
)
ENTRY = Entry.of(
    P2P_NCCL,
    kv_connectors=("P2pNcclConnector",),
    signs=ContractSigns(last_version="0.23"),
    registered=registered,
    registration_port=30001,
)
