"""What a KV transfer contract declares, so that one exchange can run all of them.

Owns the vocabulary between `serving` and the contracts: what each leg is sent, what shows that the
KV is ready, which engine makes the first token, and who holds the KV afterwards. `serving` asks a
contract for these things, never for its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.peers import Peer, PeerSource
from pdproxy.transfer.turns import TurnRules
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.notices import Notice
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone, Prompt
from pdproxy.wire.sent_body import SentBody, joined, sent_body


class Receiver(msgspec.Struct, frozen=True):
    """Where a decode engine receives KV: a host, and for each of two purposes one port per
    tensor-parallel rank.
    """

    host: str
    init_ports: tuple[int, ...]
    alloc_ports: tuple[int, ...]


class Dispatch(msgspec.Struct, frozen=True):
    """What is known of one prompt's dispatch to one pair before its first leg. Every further try
    has its own.

    `leg_id` is made for the prefill leg: two clients may use the same id, two dispatches never do.
    None if nothing uses it. `ids` are the prompt's token ids, None if they are not known.
    `prefill_takes_ids`: the prefill engine may be sent them in place of the prompt's text.
    `prefill_peer` and `decode_peer`: the engines' ranks that the legs go to, and what is known of
    them; None if the contract has no `peers_from`. `turn`: `kv_transfer_params` of a decode engine
    that keeps KV of the prompt's beginning; the prefill engine must work on exactly `ids` then.
    `answer_ids`: the decode engine is asked for the answer's ids. `compares_ids`: the prefill
    engine is asked for the prompt's ids also where no leg carries them.
    """

    leg_id: str | None = None
    ids: TokenIds | None = None
    prefill_takes_ids: bool = True
    receiver: Receiver | None = None
    prefill_peer: Peer | None = None
    decode_peer: Peer | None = None
    turn: bytes | None = None
    answer_ids: bool = False
    compares_ids: bool = False

    @property
    def prefill_ids(self) -> TokenIds | None:
        """The prompt's ids, if the prefill engine is sent them in place of the text; else None."""
        return self.ids if self.prefill_takes_ids else None


NO_DISPATCH = Dispatch()
"""The dispatch for contracts that need nothing of it."""


class LegRequest(msgspec.Struct, frozen=True):
    """What one engine is sent: a generating route, a body, and headers beside those of every leg
    (names in lower case).
    """

    route: Route
    content: SentBody
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        """The body in one piece."""
        return joined(self.content)


class FirstToken(msgspec.Struct, frozen=True):
    """The first token of the answer, if the prefill engine made it: its id, its text, and its
    finish if it was the last.

    `stop_reason` is JSON, as the engine wrote it.
    """

    id: int
    text: str
    finish_reason: str | None = None
    stop_reason: bytes = b"null"


class Counts(msgspec.Struct, frozen=True):
    """What is kept of a handle after its end: nothing that an engine could be sent. The fields are
    those of `Handle`.
    """

    prompt_tokens: int
    remote_request_id: str
    created_cache_tokens: int | None = None
    cached_tokens: int | None = None
    first: FirstToken | None = None


class Handle(msgspec.Struct, frozen=True):
    """What a prefill engine returned of a prompt's KV. If the KV is held for us, exactly one party
    must end that.

    It is sent to one engine, once: the engine that reads the KV has it freed, and its blocks hold
    another prompt's KV then.

    - `params`: the engine's `kv_transfer_params`, unchanged.
    - `token_ids`: the prompt's ids as a JSON array, None if the engine did not return them.
    - `prompt_tokens`: the prompt's length in tokens.
    - `created_cache_tokens`: how many of them were new to the prefill engine's prefix cache, None
      if it does not report it.
    - `cached_tokens`: how many of them it found there. Set only where the decode engine can't know:
      all the KV that it received counts as cached there.
    - `first`: the answer's first token, if the decode engine continues behind it.
    - `alone`: why one engine must serve the request although the KV is there. The KV then only has
      to be released.
    - `release`: the request by which the decode engine drops the KV. Set only where the handle's
      other fields don't show it.
    """

    params: bytes
    token_ids: bytes | None
    prompt_tokens: int
    remote_request_id: str
    created_cache_tokens: int | None = None
    cached_tokens: int | None = None
    first: FirstToken | None = None
    alone: Alone | None = None
    release: LegRequest | None = None

    def counts(self) -> Counts:
        """Return what is kept after its end."""
        return Counts(
            self.prompt_tokens,
            self.remote_request_id,
            self.created_cache_tokens,
            self.cached_tokens,
            self.first,
        )


class Holder:
    """Who holds a prompt's KV after the prefill, and what follows for the legs. See the classes
    below.
    """

    def pushed_to(self, decode: str) -> str | None:
        """Return the engine that a leg's KV is pushed to, None if it stays at the prefill engine.
        `decode`: the leased one.
        """
        return None

    @property
    def lease(self) -> float | None:
        """Seconds for which a prefill engine keeps unread KV, if it was not told otherwise. None:
        until it is released.
        """
        return None

    @property
    def late_kv_may_be_read(self) -> bool:
        """Whether a decode engine may be asked although notices of the KV are missing: it computes
        what it does not find.
        """
        return True

    @property
    def decode_waits(self) -> bool:
        """Whether a decode engine that was asked keeps its blocks until the KV comes, also after
        its request was closed.
        """
        return False

    def loses_closed(self, handle: Handle) -> bool:
        """Return whether a decode engine never frees its blocks if its request is closed while it
        waits, though the KV comes.
        """
        return False

    def prefill_again(self, status: int | None) -> bool:
        """Return whether a failed prefill under the same id, once more, gives the KV to a decode
        engine that waits for it.

        `status`: of the prefill engine's answer, if there is one.
        """
        return self.decode_waits

    def refusal_released(self, error_type: str, param: str | None) -> bool:
        """Return whether a decode engine that refused a request with a 400 of this kind has
        released its KV by that.
        """
        return False


def never_refused(_error_type: str, _param: str | None) -> bool:
    """Return whether a refused request has released its KV: it never has."""
    return False


@dataclass(frozen=True, slots=True)
class NotHeld(Holder):
    """Nobody holds KV for a request. Nothing has to be released."""


@dataclass(frozen=True, slots=True)
class HeldByPrefill(Holder):
    """The prefill engine holds the KV until a decode engine has read it or reports that it will
    not, or until a lease ends.

    `release_body(model, handle)`: a completion that any compatible decode engine refuses with 400,
    after it has reported to the prefill engine that the KV may be freed. `refused(error_type,
    param)`: whether a client's request that was refused in this way has had the same effect.
    `handshakes`: before the first transfer of two engines they need a handshake, after which a
    decode engine reports a refusal only in a later step.
    """

    release_body: Callable[[str | None, Handle], bytes]
    refused: Callable[[str, str | None], bool]
    handshakes: bool = True
    lease: float | None = None

    def refusal_released(self, error_type: str, param: str | None) -> bool:
        """Return whether a decode engine that refused a request with a 400 of this kind has
        released its KV by that.
        """
        return self.refused(error_type, param)


@dataclass(frozen=True, slots=True)
class HeldByDecode(Holder):
    """The prefill engine pushes the KV into a buffer of one decode engine, where it stays until
    that engine reads it.

    So only that engine can release it. KV must not be read before all its notices have come: parts
    of it may not be written yet. A prefill leg must not be closed before its answer: the engine may
    fail while it pushes.

    `release_leg(model, handle)`: a request that makes the decode engine read the KV, answered with
    200. Its id is one of its own unless its headers have one. `read_waits`: the engine waits for
    ever for KV that it has read before. `drops_aborted`: it drops the KV of a request that it has
    when that request is closed.
    """

    release_leg: Callable[[str | None, Handle], LegRequest]
    read_waits: bool = False
    drops_aborted: bool = False

    def pushed_to(self, decode: str) -> str | None:
        """Return the engine that a leg's KV is pushed to."""
        return decode

    @property
    def late_kv_may_be_read(self) -> bool:
        """Whether a decode engine may be asked although notices of the KV are missing."""
        return False


@dataclass(frozen=True, slots=True)
class PushedToDecode(Holder):
    """The prefill engine writes the KV into blocks that the decode engine has reserved when it was
    asked, in either order.

    The prefill engine frees its blocks after that, or when a lease ends. A decode engine that waits
    keeps its blocks, also after its request was closed, until the KV comes; without it for
    `stuck_for` seconds, None: until the engine restarts. So a prefill leg that a decode engine may
    wait for is not closed before its answer.

    `release_body(model, handle)`: a completion that any compatible decode engine refuses with 400,
    after it has reported to the prefill engine that the KV may be freed; None, as the field itself
    or as the result: only its lease frees KV that no decode engine waits for. `refused(error_type,
    param)`: whether a client's request that was refused in this way has had the same effect.
    `handshakes`: as above.

    `forgets`: a prefill engine that gives a request up forgets that a decode engine waits for it,
    and loses blocks if it runs two requests of one id. So it is asked again under the same id only
    if it has certainly not begun. `loses(handle)`: see above.
    """

    release_body: Callable[[str | None, Handle], bytes | None] | None = None
    refused: Callable[[str, str | None], bool] = never_refused
    stuck_for: float | None = None
    handshakes: bool = True
    forgets: bool = False
    loses: Callable[[Handle], bool] | None = None
    lease: float | None = None

    @property
    def decode_waits(self) -> bool:
        """Whether a decode engine that was asked keeps its blocks until the KV comes: it does."""
        return True

    def prefill_again(self, status: int | None) -> bool:
        """Return whether a failed prefill under the same id, once more, gives the KV to a decode
        engine that waits for it.
        """
        return status in _NOT_BEGUN or not self.forgets

    def loses_closed(self, handle: Handle) -> bool:
        """Return whether a request that is closed while it waits never frees its blocks."""
        return self.loses is not None and self.loses(handle)

    def refusal_released(self, error_type: str, param: str | None) -> bool:
        """Return whether a decode engine that refused a request with a 400 of this kind has
        released its KV by that.
        """
        return self.refused(error_type, param)


_NOT_BEGUN = (429, 503)
"""Statuses with which an engine, or what is before it, refuses a request because it is busy."""
NOT_HELD = NotHeld()


class Channel(Enum):
    """How engines send notices that KV is ready."""

    HTTP = "http"  # as POST requests to the port on which clients reach the proxy
    ZMQ = "zmq"  # to the socket of `kv_ready`


ORDER_NAMES = ("sequential", "concurrent")
"""The orders in which legs can run: `serving.dispatch.orders` has a function for each."""


OPENAI_ROUTES = frozenset({Route.COMPLETIONS, Route.CHAT})
ALL_ROUTES = frozenset(Route)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a contract before it is built. Settings are checked against it."""

    needs_ids: bool = False
    """The prefill leg can't be made without the prompt's token ids."""

    takes_ids: bool = False
    """Legs differ where the proxy knows the prompt's token ids. True for all that need them."""

    needs_receiver: bool = False
    """The prefill leg names the address at which the decode engine receives KV."""

    notices_over: Channel | None = None
    """How engines send notices, if they send any. None: there are none."""

    orders: tuple[str, ...] = ("sequential",)
    """The orders in which the legs can run, the usual one first: as in `ORDER_NAMES`."""

    peers_from: PeerSource | None = None
    """How the proxy learns where engines reach each other, where the legs need it."""

    names_host: bool = False
    """Handles name a host of the prefill engine, which decode engines connect to."""

    one_receiver: bool = False
    """Each prefill engine pushes KV to one decode engine, which its own configuration names.
    Settings must pair them so.
    """

    hands_back: bool = False
    """Decode engines can keep KV of a finished turn for a prefill engine: `Contract.turns`."""

    alone_on: tuple[str, ...] = ("aggregated", "decode")
    """The roles whose engines may serve a request alone, the first choice first. Some connectors
    break, or give wrong answers to, requests that no other engine takes part in.
    """

    any_role: bool = False
    """One engine (`kv_both`) can make KV for others, use theirs, and serve requests alone, at the
    same time: role `any`.
    """

    whole_on_prefill: bool = False
    """A prefill engine can also serve requests alone."""

    routes: frozenset[Route] = OPENAI_ROUTES
    """The routes on which its legs can run. One engine serves requests of the others alone."""

    media: bool = False
    """Its legs can run where a prompt has media: KV is known by the leg, not by token ids."""

    needs_length: bool = False
    """Prefill engines keep only KV of an answer that ends by length. Where its first token may end
    it otherwise, no decode engine is asked before.
    """

    caches_loaded: bool = False
    """A decode engine has KV that it has loaded in its prefix cache, for requests that bring no
    handle.
    """

    short_prompts: bool = False
    """Prompts shorter than a KV block can be split between two engines, too."""

    mixed_parallel_sizes: bool = False
    """A pair may have different tensor-parallel sizes, if one is a multiple of the other."""

    @property
    def canary_on(self) -> frozenset[str]:
        """The roles whose engines may be sent a completion, to see whether they work."""
        more = {"prefill": self.whole_on_prefill, "any": self.any_role}
        return frozenset((*self.alone_on, *(role for role, can in more.items() if can)))


NO_CAPABILITIES = Capabilities()


def any_length(_parsed: Parsed) -> int:
    """Return the minimum of tokens in a prompt: every prompt has it."""
    return 1


def minted_id(minted: str, _dispatch: Dispatch) -> str:
    """Return the id of a leg: the minted one."""
    return minted


def no_notices(_dispatch: Dispatch) -> int | None:
    """Return how many notices come for any prompt: none."""
    return 0


@dataclass(frozen=True, slots=True)
class Contract:
    """How KV is transferred: what each engine is sent, and what the proxy waits for in between. All
    functions are pure.

    `order` names the order in which the legs run: one of `capabilities.orders`. If it is
    not given, it is the first of them. The legs:
        - `prefill(parsed, prompt, dispatch)` returns the prefill leg.
        - `handle(parsed, answer, dispatch)` reads the prefill engine's answer. It returns the
          handle of the KV, or a text: why the answer can't be used.
        - `decode(parsed, prompt, handle, dispatch)` returns the decode leg.
        - `promise(parsed, dispatch)`, where the legs can run at once: returns the handle that the
          decode engine is sent while the prefill engine still works, None if that is not possible
          for these engines yet. Then the prefill leg comes first.
        - `peer_in(answer, dispatch)` returns where the prefill engine's rank is reached, if its
          answers show it.

    What the prefill leg needs, besides what `capabilities` says:
        - `needs_leg_id`: an id of its own, because notices or engines name the leg by it.
        - `leg_id(minted, dispatch)` returns that id: the minted one unless the contract gives ids a
          form. It has 32 hex digits; with `decode_has_leg_id` and no form as many as the client's
          id has characters, 32 at least.
        - `decode_has_leg_id`: the decode leg has the same id, because the engines find each other
          by it.
        - `min_tokens(parsed)`: shorter prompts are served by one engine.

    Notices, which engines send when KV is ready:
        - `notices(dispatch)` returns how many of them the decode leg waits for, besides the prefill
          engine's answer. None: each notice says how many there are. 0: the decode leg waits for
          none.
        - `handle_from_notice(notice)` returns the handle that a notice of the prefill engine
          carries, None if it carries none. The field itself is None if no notice can carry one.
        - `early`: the handle of such a notice is used before the prefill engine's answer has come.

    Afterwards:
        - `holder`: who holds the KV until it is read or released.
        - `at_host(handle, host)` returns the handle with another host of the prefill engine. None:
          it names none.
        - `turns`: how KV of a finished turn is handed back to a prefill engine, None if it is not.
    """

    name: str
    prefill: Callable[[Parsed, Prompt, Dispatch], LegRequest]
    handle: Callable[[Parsed, PrefillAnswer, Dispatch], Handle | str]
    decode: Callable[[Parsed, Prompt, Handle, Dispatch], LegRequest]
    capabilities: Capabilities = NO_CAPABILITIES
    needs_leg_id: bool = False
    leg_id: Callable[[str, Dispatch], str] = minted_id
    decode_has_leg_id: bool = False
    min_tokens: Callable[[Parsed], int] = any_length
    order: str = ""
    promise: Callable[[Parsed, Dispatch], Handle | None] | None = None
    peer_in: Callable[[PrefillAnswer, Dispatch], Peer | None] | None = None
    notices: Callable[[Dispatch], int | None] = no_notices
    handle_from_notice: Callable[[Notice], Handle | None] | None = None
    early: bool = False
    holder: Holder = NOT_HELD
    at_host: Callable[[Handle, str], Handle] | None = None
    turns: TurnRules | None = None

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", self.capabilities.orders[0])
        if self.order not in ORDER_NAMES:
            raise ValueError(f"the contract {self.name!r} names no order of legs: {self.order!r}")

    @property
    def needs_ids(self) -> bool:
        """Whether the prefill leg can't be made without the prompt's token ids."""
        return self.capabilities.needs_ids

    @property
    def needs_receiver(self) -> bool:
        """Whether the prefill leg names the address at which the decode engine receives KV."""
        return self.capabilities.needs_receiver

    def has_notices_over(self, channel: Channel) -> bool:
        """Return whether engines send notices in this way."""
        some = self.notices is not no_notices or self.handle_from_notice is not None
        return some and self.capabilities.notices_over is channel


def raw(value: bytes) -> msgspec.Raw:
    """Wrap JSON that is already encoded.

    Raises:
        ValueError: it is empty, which no JSON is. The body would be invalid, and its engine would
            refuse a valid request.
    """
    if not value:
        raise ValueError("an empty text is no JSON")
    return msgspec.Raw(value)


def encode(fields: Fields) -> bytes:
    """Return the JSON of a body: a copy of each field's bytes, nothing is parsed."""
    return msgspec.json.encode(fields)


def leg(
    parsed: Parsed,
    fields: Fields,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    ids: bytes | None = None,
) -> LegRequest:
    """Return a leg on the request's own route, whose body has these fields, and the prompt's `ids`
    in its `kv_transfer_params` if they are not None.
    """
    return LegRequest(parsed.route, sent_body(fields, parsed.body_bytes, ids), headers)
