"""vLLM's `CPUConnector`: each prefill engine pushes KV to the host memory of the one decode engine
that its configuration names.

Source: vLLM pull request 18332, `cpu_connector.py` and `nixl_cpu_utils.py`. The prefill leg carries
nothing; its answer is `{prefill_request_id}`, which goes to the decode engine unchanged. That
engine waits until as many tokens have come under this id as the prompt has, and it finds its own
request only if that has the same id. So both legs carry one id, which is made for each dispatch:
under an id that two clients share, KV would be mixed up, and an id that comes twice is awaited for
ever.

What was pushed stays in the decode engine's buffer until a request with this id loads whole blocks
of it. So if no decode leg will, the proxy has it loaded by a request of its own, on the same route,
since the engine makes its id from the route and ours. A prompt shorter than a block is not loaded
by its own decode leg either. The prefill leg is never closed before its answer: the rest would not
come, and a part can't be loaded.
"""

from __future__ import annotations

import msgspec

from pdproxy.transfer.bodies import decode_fields, prefill_fields
from pdproxy.transfer.contract import (
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
from pdproxy.transfer.handles import answered
from pdproxy.transfer.signs import ContractSigns
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone, Prompt

_WORDS = " ".join(["x"] * 256)
"""A text of more tokens than the largest KV block, for the request that loads what no client needs.
Its content is not used.
"""
_CHAT_ID = "chatcmpl-"


class _Params(msgspec.Struct, frozen=True):
    prefill_request_id: str


_params_decoder = msgspec.json.Decoder(_Params)


class CpuOptions(msgspec.Struct, frozen=True):
    """`block_size`: tokens in a KV block of the decode engines."""

    block_size: int = 16


def prefill(parsed: Parsed, prompt: Prompt, _dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: the client's request with one token. More than one would make the KV
    unusable.
    """
    return leg(parsed, prefill_fields(parsed, prompt))


def decode(parsed: Parsed, prompt: Prompt, given: Handle, _dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request with the prefill engine's answer."""
    fields = decode_fields(parsed, prompt)
    fields["kv_transfer_params"] = raw(given.params)
    return leg(parsed, fields)


def release_leg(model: str | None, given: Handle) -> LegRequest:
    """Return a request that makes the decode engine load what was pushed, under the id of the
    prefill leg.

    Its own salt keeps what it loads out of the prefix cache of other prompts.
    """
    fields: Fields = {"max_tokens": raw(b"1"), "stream": raw(b"false"), "temperature": raw(b"0")}
    text = msgspec.json.encode(_WORDS)
    route = Route.COMPLETIONS
    if _params_decoder.decode(given.params).prefill_request_id.startswith(_CHAT_ID):
        route = Route.CHAT
        fields["messages"] = raw(b'[{"role":"user","content":%b}]' % text)
    else:
        fields["prompt"] = raw(text)
    if model is not None:
        fields["model"] = raw(msgspec.json.encode(model))
    fields["cache_salt"] = raw(msgspec.json.encode(given.remote_request_id))
    fields["kv_transfer_params"] = raw(given.params)
    return LegRequest(route, encode(fields), ((b"x-request-id", given.remote_request_id.encode()),))


NAME = "cpu"
CAPABILITIES = Capabilities(one_receiver=True)


def cpu(options: CpuOptions) -> Contract:
    """Return the contract with these options."""

    def handle(_parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
        """Return the handle: the answer's params, and the legs' common id."""
        params = bytes(answer.kv_transfer_params)
        try:
            if not _params_decoder.decode(params).prefill_request_id:
                return "its prefill_request_id is empty"
        except UNREADABLE:
            return (
                "the answer has no prefill_request_id: is the engine started with CPUConnector "
                "as kv_producer?"
            )
        alone = Alone.SHORT_PROMPT if answer.usage.prompt_tokens < options.block_size else None
        return answered(answer, params, dispatch.leg_id or "", alone=alone)

    return Contract(
        name=NAME,
        prefill=prefill,
        handle=handle,
        decode=decode,
        capabilities=CAPABILITIES,
        needs_leg_id=True,
        decode_has_leg_id=True,
        holder=HeldByDecode(release_leg, read_waits=True),
    )


ENTRY = Entry(
    name=NAME,
    build=cpu,
    options=CpuOptions,
    section="pool.cpu",
    capabilities=CAPABILITIES,
    kv_connectors=("CPUConnector",),
    signs=ContractSigns(last_version="0.10"),
)
