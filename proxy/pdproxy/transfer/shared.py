"""Storage that both engines reach: the prefill engine writes KV there, the decode engine finds it by the prompt itself.

Source: vLLM 0.32.0 `example_connector.py`; Mooncake's store and LMCache's shared storage work alike. Nothing of it is in any
request, and nothing is kept for anybody: the legs are the client's request with one token, then the client's request. The
answer tells that the KV is stored, since ExampleConnector writes it before the step ends.
"""

from __future__ import annotations

from pdproxy.transfer.bodies import decode_fields, prefill_fields
from pdproxy.transfer.contract import Contract, Dispatch, Handle, LegRequest, encode, unclaimed
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.request import Parsed, Prompt


def prefill(parsed: Parsed, prompt: Prompt, _dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: the client's request with one token."""
    return LegRequest(parsed.route, encode(prefill_fields(parsed, prompt)))


def handle(_parsed: Parsed, answer: PrefillAnswer, _dispatch: Dispatch) -> Handle | str:
    """Return a handle without a claim: what the prefill engine counted, to be compared with the decode engine's count."""
    return unclaimed(answer)


def decode(parsed: Parsed, prompt: Prompt, _given: Handle, _dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request."""
    return LegRequest(parsed.route, encode(decode_fields(parsed, prompt)))


SHARED = Contract(name="shared", prefill=prefill, handle=handle, decode=decode)
