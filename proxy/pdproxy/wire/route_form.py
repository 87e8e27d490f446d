"""What a generating route is: how its body names the prompt, the limit and the stream, what a
prefill leg sends and gets, and which API its answers have.

`wire.routes` has one module per route, each with one `RouteForm`; `wire.route` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.fields import Fields, inner_fields
from pdproxy.wire.passthrough_body import PassedBody, whole_body


class Alone(Enum):
    """Why a request is served by one engine alone. The value is the label of
    `pdproxy_alone_total{reason}`.
    """

    N = "n"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    NON_TEXT = "non_text"
    PROMPT_IDS = "prompt_ids"
    BUILT_IN_TOOLS = "built_in_tools"
    ROUTE = "route"
    SHORT_PROMPT = "short_prompt"
    UNUSUAL = "unusual"
    NO_PAIR = "no_pair"
    NOT_ENCODED = "not_encoded"
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_FAILED = "prefill_failed"
    NO_HANDLE = "no_handle"
    NO_TOKENS = "no_tokens"
    KV_BUFFER = "kv_buffer"
    KV_LATE = "kv_late"
    KV_FAILED = "kv_failed"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    DECIDED = "decided"


_SAMPLES, _SAMPLE = 16, 1024
"""Pieces of a medium of which its key is made, and the bytes of each."""


class Medium(msgspec.Struct, frozen=True):
    """A picture, a sound or a video whose bytes are in the body.

    `head`, `value` and `tail` in a row are the JSON of a chat's content part that has it alone,
    whatever the client's route is; `value` is a piece of the body.
    """

    head: bytes
    value: msgspec.Raw
    tail: bytes

    @property
    def size(self) -> int:
        """Its bytes, as JSON."""
        return memoryview(self.value).nbytes

    @property
    def key(self) -> str:
        """What two media with the same bytes have in common. Only samples are read: a large medium
        takes no longer.
        """
        value = memoryview(self.value)
        step = max(_SAMPLE, value.nbytes // _SAMPLES)
        samples = [value[at : at + _SAMPLE] for at in range(0, value.nbytes, step)]
        found = blake2b(value.nbytes.to_bytes(8, "big"), digest_size=16)
        for sample in samples:
            found.update(sample)
        return found.hexdigest()


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request. `raw` is its JSON; None where the prompt is the whole conversation.

    `tokens` is the exact length if the client sent token ids, else None; `text_bytes` is an upper
    bound of its UTF-8 size; `messages` how many messages it has (0 for a completion); `non_text`: a
    conversation of a batch has other content. `media`: in the order of the prompt, all of them
    within the body, so that two engines see the same; each counts as `MEDIUM` bytes of text.
    """

    raw: msgspec.Raw | None
    tokens: int | None
    text_bytes: int
    messages: int = 0
    non_text: bool = False
    media: tuple[Medium, ...] = ()


class Reading(NamedTuple):
    """What a body asks for. `prompts`: none if only an engine reads them; `is_list`: the body has a
    list of them.

    `alone`: a reason in the body itself to use one engine, None if the request may be split.
    """

    prompts: tuple[Prompt, ...]
    alone: Alone | None
    is_list: bool = False


Read = Callable[[Fields, Bounds], Reading]
"""Reads a plain body.

Raises:
    UnusualError: only an engine can judge it; TooManyPromptsError: it asks for more than one
        request may; MediaUrlError: it names media that engines are not to fetch.
    msgspec.MsgspecError, UnicodeDecodeError, RecursionError: as UnusualError.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteForm:
    """One generating route.

    The body:
        - `read`: see `Read`.
        - `prompt_fields`: the fields whose text is in the prompt, in the prompt's order.
        - `listed`: the fields that may be lists of prompts, and how a list of several begins, as in
          `prompt_lists.count_in`.
        - `asks_in`: the field whose object has `limits` and `answers`, None: the body itself.
        - `limits`: the fields that limit an answer's tokens, the one that counts first;
          `limit_if_absent`: what engines take where there is none of them, None: the context's end.
        - `answers`: the fields that ask for several answers to a prompt.
        - `stops`: the fields that have an answer end at a text or a token; `has_min_tokens`:
          engines read `min_tokens`, beside `limits`, so that no token ends it before.
        - `unseen`: the fields that a prefill leg drops.
        - `has_usage_event`: `stream_options` say whether the client gets a stream's usage; if not,
          each stream has it.
        - `has_priority_header`: the priority in a header goes before the body's.
        - `has_rank_header`: engines read from a header which data-parallel rank a leg goes to.
        - `body_id_prefix`: engines take a request's id from the body's `request_id` alone, and
          this is how the ids begin that they make themselves. None: they take it from a header.
        - `keeps_prompt_ids`: engines read a prompt's ids that a client may send
          (`fields.PROMPT_IDS`).
        - `checks_all_media`: media may stand anywhere in the body.
        - `has_salt`: engines read `cache_salt`.

    The legs:
        - `prefill` changes the fields of a prefill leg: one token, not streamed.
        - `both` changes the fields of both legs, None: nothing.
        - `prefill_answer` reads the prefill engine's answer, None: that is not possible.
        - `returns_ids`: answers have token ids where the request asks for them
          (`return_token_ids`), and so streams may go on at another engine.
        - `takes_ids`: the proxy can make the prompt's ids, and legs can carry them.

    The answer:
        - `dialect`: the API of answers, events and errors.
        - `is_named`: a stream's events have names (`event: ...`, or `type` in the data), and one
          of its last events has the usage.
        - `goes_whole(alone)`: whether one engine gets the client's own body, on this route.
        - `whole(fields, model)`: that body; `model`: as its engines name it.
        - `has_own_words`: an engine's refusal of a leg is not the answer: the engine is sent the
          client's own body, and refuses that.
        - `frees_refused`: a decode engine that refuses a leg frees its KV.
    """

    path: str
    dialect: Dialect = Dialect.OPENAI
    read: Read
    prompt_fields: tuple[str, ...]
    listed: Mapping[str, bytes]
    asks_in: str | None = None
    limits: tuple[str, ...]
    limit_if_absent: int | None = None
    answers: tuple[str, ...] = ("n", "best_of")
    stops: tuple[str, ...] = ("stop", "stop_token_ids")
    has_min_tokens: bool = True
    unseen: tuple[str, ...] = ()
    has_usage_event: bool = True
    has_priority_header: bool = True
    has_rank_header: bool = True
    body_id_prefix: str | None = None
    keeps_prompt_ids: bool = True
    checks_all_media: bool = False
    has_salt: bool = True
    prefill: Callable[[Fields], None]
    both: Callable[[Fields], None] | None = None
    prefill_answer: Callable[[bytes], PrefillAnswer | None] = prefill_answer
    returns_ids: bool = True
    takes_ids: bool = True
    is_named: bool = False
    goes_whole: Callable[[Alone], bool] = lambda _: False
    whole: Callable[[Fields, str | None], PassedBody] = whole_body
    has_own_words: bool = False
    frees_refused: bool = True

    def asked(self, fields: Fields) -> Fields:
        """Return the fields of a body that have limits and numbers of answers."""
        return fields if self.asks_in is None else inner_fields(fields, self.asks_in) or {}
