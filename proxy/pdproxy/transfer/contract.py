"""What a KV transfer contract declares, so that one exchange can run all of them.

Owns the vocabulary between `serving` and the contracts: what each leg is sent and in which order, what tells that the KV
is ready, where the first token comes from, and who holds KV afterwards. Another contract is another module with one
`Contract`; nothing in `serving` asks for a contract's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.notices import Notice
from pdproxy.wire.request import Alone, Parsed, Prompt, Route


class Receiver(msgspec.Struct, frozen=True):
    """Where a decode engine receives KV: a host, and a port a tensor-parallel rank for each of two purposes."""

    host: str
    init_ports: tuple[int, ...]
    alloc_ports: tuple[int, ...]


class Dispatch(msgspec.Struct, frozen=True):
    """What is known of one prompt's dispatch to one pair before its first leg. Every further try has one of its own.

    `leg_id` is minted for the prefill leg: two clients may use one id, two dispatches never do. None where nothing goes by it.
    `ids` are the prompt's token ids, None if they are not known; `prefill_takes_ids`: the prefill engine may take them
    for the prompt.
    """

    leg_id: str | None = None
    ids: TokenIds | None = None
    prefill_takes_ids: bool = True
    receiver: Receiver | None = None


NO_DISPATCH = Dispatch()
"""For contracts that need none of it."""


class LegRequest(msgspec.Struct, frozen=True):
    """What one engine is asked: a generating route, and a body."""

    route: Route
    body: bytes


class FirstToken(msgspec.Struct, frozen=True):
    """The first token of the answer, where the prefill engine made it: its id, its text, and its finish if it was the last.

    `stop_reason` is JSON, as the engine wrote it.
    """

    id: int
    text: str
    finish_reason: str | None = None
    stop_reason: bytes = b"null"


class Handle(msgspec.Struct, frozen=True):
    """A claim on KV that a prefill engine made for us. Where it is kept there, exactly one party may end it.

    `params` is the engine's `kv_transfer_params` verbatim, `token_ids` the prompt's ids as a JSON array (None if the
    engine did not say them), `prompt_tokens` the prompt's length, `created_cache_tokens` how many of them were new to the
    prefill engine's prefix cache, if it tells. `cached_tokens` is how many were found there, where it tells and the decode
    engine can't know: for that one all KV that it was given is cached. `first` is the answer's first token where the decode
    engine goes on behind it. `alone`: why the request must be served by one engine although the KV is there; the handle only
    has to be given back.
    """

    params: bytes
    token_ids: bytes | None
    prompt_tokens: int
    remote_request_id: str
    created_cache_tokens: int | None = None
    cached_tokens: int | None = None
    first: FirstToken | None = None
    alone: Alone | None = None


def unclaimed(
    answer: PrefillAnswer,
    token_ids: bytes | None = None,
    remote_request_id: str = "",
    first: FirstToken | None = None,
    *,
    more: int = 0,
) -> Handle:
    """Return a handle that nobody has to end: what the prefill engine counted, and how the decode engine goes on.

    `more`: how many tokens of the prompt the prefill engine wasn't asked to see.
    """
    said = answer.details()
    return Handle(
        params=b"",
        token_ids=token_ids,
        prompt_tokens=answer.usage.prompt_tokens + more,
        remote_request_id=remote_request_id,
        created_cache_tokens=said.created_cache_tokens,
        cached_tokens=said.cached_tokens,
        first=first,
    )


def nothing_to_release(_model: str | None, _handle: Handle) -> bytes | None:
    """Return no body: the contract's KV is not kept for anybody."""


def never_released(_error_type: str, _param: str | None) -> bool:
    """Tell that no refusal gives a handle back."""
    return False


def anything(_parsed: Parsed) -> int:
    """Return the least tokens of a prompt: no more than one has."""
    return 1


def no_notices(_dispatch: Dispatch) -> int | None:
    """Return how many notices come for any prompt: none."""
    return 0


@dataclass(frozen=True, slots=True)
class Contract:
    """The choreography of one KV transfer contract. All functions are pure.

    `order` names the order in which its legs run: a module of `serving.dispatch.orders`.

    What goes on the wire:
        - `prefill(parsed, prompt, dispatch)`: what the prefill engine is asked.
        - `handle(parsed, answer, dispatch)`: what its answer hands over; a str says why it hands over nothing usable.
        - `decode(parsed, prompt, handle, dispatch)`: what the decode engine is asked.

    What it takes, and what it leaves behind:
        - `notices(dispatch)`: how many ranks tell that the KV is where the decode engine looks for it, besides the prefill
          engine's answer; None: as many as the notices say.
        - `handle_from_notice(notice)`: the handle in a prefill engine's notice, None if it holds none. None: engines send
          no such notices.
        - `early`: such a handle counts before the answer does.
        - `needs_ids`: the prompt's token ids are part of the prefill leg.
        - `needs_receiver`: so is the address at which the decode engine receives.
        - `needs_leg_id`: the prefill leg gets an id of its own, by which notices or engines name it.
        - `min_tokens(parsed)`: tokens of the shortest prompt that is worth a handover, besides one of the engines' KV blocks.
        - `holds`: the KV is kept for us until somebody ends the handle; by the prefill engine, or, where it `pushes`, by the
          decode engine that got it: then that one alone can give it back, and KV of which no notice came must not be read.
        - `ends_whole`: the prefill leg must not be closed before its answer.
        - `release_body(model, handle)`: the body of a completion that makes a decode engine give the handle back, None if there
          is none; `releases` is the status that says that it has.
        - `refusal_released(error_type, param)`: whether a decode engine that refused a request with a 4xx has given
          its handle back by itself.
    """

    name: str
    prefill: Callable[[Parsed, Prompt, Dispatch], LegRequest]
    handle: Callable[[Parsed, PrefillAnswer, Dispatch], Handle | str]
    decode: Callable[[Parsed, Prompt, Handle, Dispatch], LegRequest]
    order: str = "prefill_then_decode"
    notices: Callable[[Dispatch], int | None] = no_notices
    handle_from_notice: Callable[[Notice], Handle | None] | None = None
    early: bool = False
    needs_ids: bool = False
    needs_receiver: bool = False
    needs_leg_id: bool = False
    min_tokens: Callable[[Parsed], int] = anything
    holds: bool = False
    pushes: bool = False
    ends_whole: bool = False
    release_body: Callable[[str | None, Handle], bytes | None] = nothing_to_release
    releases: int = 400
    refusal_released: Callable[[str, str | None], bool] = never_released


def raw(value: bytes) -> msgspec.Raw:
    """Wrap JSON that is already encoded."""
    return msgspec.Raw(value)


def encode(fields: Fields) -> bytes:
    """Put a body together again: a copy of each field's bytes, nothing is parsed."""
    return msgspec.json.encode(fields)
