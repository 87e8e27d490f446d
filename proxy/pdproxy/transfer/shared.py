"""Storage that both engines reach: the prefill engine writes KV there, the decode engine finds it
by the prompt itself.

Source: vLLM 0.32.0 `example_connector.py`; Mooncake's store and LMCache's shared storage work in
the same way. No request mentions the storage, and nothing is held for anybody: the legs are the
client's request with one token, then the client's request. The prefill engine's answer shows that
the KV is stored, since ExampleConnector writes it before the step ends.

A storage that does not tell pictures apart confuses them also where one engine serves, since every
engine stores and finds. ExampleConnector adds their hashes to its keys, Mooncake's store has vLLM's
own block hashes, LMCache 0.5.6 puts parts of their hashes in the place of their token ids.
"""

from __future__ import annotations

from pdproxy.transfer.bodies import decode_fields, prefill_fields
from pdproxy.transfer.contract import (
    ALL_ROUTES,
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    LegRequest,
    leg,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import unclaimed
from pdproxy.transfer.signs import ContractSigns
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt


def prefill(parsed: Parsed, prompt: Prompt, _dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: the client's request with one token."""
    return leg(parsed, prefill_fields(parsed, prompt))


def handle(_parsed: Parsed, answer: PrefillAnswer, _dispatch: Dispatch) -> Handle | str:
    """Return a handle without `params`: what the prefill engine counted, to compare it with the
    decode engine's count.
    """
    return unclaimed(answer)


def decode(parsed: Parsed, prompt: Prompt, _given: Handle, _dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request."""
    return leg(parsed, decode_fields(parsed, prompt))


NAME = "shared"
CAPABILITIES = Capabilities(
    any_role=True,
    whole_on_prefill=True,
    routes=ALL_ROUTES,
    media=True,
)
SHARED = Contract(
    name=NAME, prefill=prefill, handle=handle, decode=decode, capabilities=CAPABILITIES
)
ENTRY = Entry.of(
    SHARED,
    kv_connectors=(
        "ExampleConnector",
        "SharedStorageConnector",
        "MooncakeStoreConnector",
        "LMCacheConnectorV1",
        "LMCacheConnectorV1Dynamic",
        "LMCacheMPConnector",
    ),
    signs=ContractSigns(metrics=("vllm:mooncake_store_", "lmcache:")),
    # ExampleConnector and LMCacheConnectorV1 do; MooncakeStoreConnector and LMCacheMPConnector do
    # not
    ignores_salt=True,
)
