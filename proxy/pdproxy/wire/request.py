"""A client's request: what routing needs of it is read, and each field of the body stays bytes.

Owns the reading of an OpenAI body. Every top-level field is kept as the raw JSON that the client
wrote (`msgspec.Raw`), so that unknown fields stay as they are and a 64 KiB prompt never becomes
objects. Fields that the prefill leg rewrites must have the JSON type of their schema. A request in
which one has another type is `unusual`: it goes whole to one engine, whose own validation answers,
and no KV is involved. The same holds for a body that only the engines' own parser accepts
(`wire.lenient_json`): it is parsed, cleaned and encoded again.

`parse_if_quick` reads bodies that take a few milliseconds, `parse` all others, in another process
(`wire.reader_process`).
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from pdproxy.wire import client_routes, lenient_json
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import DEFAULT, SMALL, Body, Bounds, is_quick
from pdproxy.wire.fields import (
    PROMPT_IDS,
    Fields,
    has_value,
    is_absent,
    lenient_fields,
    model_of,
    plain_fields,
    read_field,
)
from pdproxy.wire.media import MEDIA_KWARGS, check_media
from pdproxy.wire.model import model_name
from pdproxy.wire.passthrough_body import check_lists
from pdproxy.wire.plain_numbers import make_plain
from pdproxy.wire.prompt_lists import (
    ChatMessage,
    Conversation,
    Span,
    conversations_in,
    count_in,
    part,
    prompts_in,
)
from pdproxy.wire.unusual import (
    NotQuickError,
    UnusualError,
    check_unseen,
    content_of,
    wants_usage_event,
)

_HUGE_INT = re.compile(rb"(?<![0-9])[0-9]{4301}")
"""Python's parser accepts no integer of more than 4300 digits. Matched only where digits begin: at
each digit, the time would be quadratic.
"""


class Route(Enum):
    """The generating routes. Legs use the first two only; what the others are for engines:
    `wire.client_routes`.
    """

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    BATCH = "/v1/chat/completions/batch"
    INVOCATIONS = "/invocations"

    def __init__(self, path: str) -> None:
        self.path = path  # read several times per request: in Python 3.11, `value` takes two calls


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
    SHORT_PROMPT = "short_prompt"
    UNUSUAL = "unusual"
    NO_PAIR = "no_pair"
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_FAILED = "prefill_failed"
    NO_HANDLE = "no_handle"
    NO_TOKENS = "no_tokens"
    KV_BUFFER = "kv_buffer"
    KV_LATE = "kv_late"
    KV_FAILED = "kv_failed"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    DECIDED = "decided"


# An enum's member is looked up by slow code of its metaclass: these are used for every request.
_COMPLETIONS, _CHAT, _BATCH, _INVOCATIONS = (
    Route.COMPLETIONS,
    Route.CHAT,
    Route.BATCH,
    Route.INVOCATIONS,
)
_UNUSUAL = Alone.UNUSUAL


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request. `raw` is its JSON; None where the prompt is the chat's messages.

    `tokens` is the exact length if the client sent token ids, else None; `text_bytes` is an upper
    bound of its UTF-8 size; `messages` how many chat messages it has (0 for a completion);
    `non_text`: a conversation of a batch has other content.
    """

    raw: msgspec.Raw | None
    tokens: int | None
    text_bytes: int
    messages: int = 0
    non_text: bool = False


class Parsed(msgspec.Struct, frozen=True):
    """A readable request. `alone` is a reason in the request itself to use one engine, None if it
    may be split.

    `route` is that of the legs; a batch keeps its own, and so does an invocation that one engine
    has to read.
    """

    route: Route
    fields: Fields
    model: str | None
    stream: bool
    wants_usage: bool
    is_list: bool
    prompts: tuple[Prompt, ...]
    alone: Alone | None
    body_bytes: int
    items: int = 0
    """Strings, arrays and objects in the body; 0 where there were too few to be counted."""
    derenders: bool = False
    """It is a chat's stream with tools, and all engines of its model can parse it behind any of its
    tokens.
    """
    unread: int = 1
    """How many prompts or conversations it has, where `prompts` is empty since only an engine reads
    them.
    """

    @property
    def goes_whole(self) -> bool:
        """Whether one engine gets the request on a route that no leg of an exchange uses."""
        return self.alone is _UNUSUAL and self.route in (Route.BATCH, Route.INVOCATIONS)

    def exchange_of(self, index: int) -> tuple[Parsed, Prompt | None]:
        """Return the request and the prompt of the exchange for the prompt at `index` of a list.

        The prompt is None if one engine must get that request as it is.
        """
        prompt = self.prompts[index]
        if self.route is not Route.BATCH or prompt.raw is None:
            return self, prompt
        own = Prompt(None, None, prompt.text_bytes, prompt.messages)
        size = (
            self.body_bytes
            - memoryview(self.fields["messages"]).nbytes
            + memoryview(prompt.raw).nbytes
        )
        alone = Alone.NON_TEXT if prompt.non_text else None
        fields = self.fields | {"messages": prompt.raw}
        chat = Parsed(
            Route.CHAT, fields, self.model, False, False, False, (own,), alone, size, self.items
        )
        return chat, None if prompt.non_text else own

    @property
    def starts_in_silence(self) -> bool:
        """Whether an engine may send nothing before it is done: the answer is not a stream, or its
        reasoning is left out.
        """
        return not self.stream or has_value(self.fields, "include_reasoning", b"false")

    @property
    def adds_usage(self) -> bool:
        """Whether an engine is asked for a usage event that the client didn't ask for."""
        return self.stream and not self.wants_usage

    @property
    def adds_ids(self) -> bool:
        """Whether an engine is asked for the token ids of a stream that the client didn't ask for.

        With tools, whose parser then also sends events without content, only if it is of use; never
        with hidden reasoning.
        """
        return (
            self.stream
            and self.alone is None
            and not self.starts_in_silence
            and ("tools" not in self.fields or self.derenders)
            and not has_value(self.fields, "return_token_ids", b"true")
        )


_messages_decoder = msgspec.json.Decoder(list[ChatMessage])
_bool_decoder = msgspec.json.Decoder(bool | None)
_int_decoder = msgspec.json.Decoder(int | None)
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
_DECIDING = _LIMITS | {
    "n",
    "echo",
    "prompt_logprobs",
    "use_beam_search",
    "min_tokens",
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "return_prompt_text",
    "logprob_token_ids",
}
"""Fields that decide whether a request needs one engine alone, or is unusual."""


def parse(route: Route, body: Body, bounds: Bounds = DEFAULT) -> Parsed:
    """Read a body.

    Raises:
        UnreadableError, UnparsableError: no engine would accept it as a JSON object.
        TooManyPromptsError, TooManyFieldsError: it holds more than one request may.
    """
    return _parsed(route, body, bounds, len(body))


def parse_if_quick(route: Route, body: Body, bounds: Bounds = DEFAULT) -> Parsed | None:
    """Read a body that takes a few milliseconds, None if it may take longer. Raises as `parse`."""
    if not is_quick(body):
        return None
    try:
        return _parsed(route, body, bounds, SMALL)
    except NotQuickError:
        return None


def _parsed(route: Route, body: Body, bounds: Bounds, max_objects: int) -> Parsed:
    fields = plain_fields(body)
    if fields is not None:
        return interpret(route, fields, len(body), bounds, max_objects)
    if len(body) > max_objects:
        raise NotQuickError
    return unusual_request(route, lenient_fields_of(route, body), len(body), bounds)


def lenient_fields_of(route: Route, body: Body) -> Fields:
    """Return the fields of a body that only the engines' own parser may take.

    Raises:
        BadRequestError: it accepts none, or there are too many, in the words of vLLM's route.
    """
    return lenient_fields(
        body,
        client_routes.load_invocation if route is Route.INVOCATIONS else lenient_json.load_object,
    )


def interpret(route: Route, fields: Fields, size: int, bounds: Bounds, max_objects: int) -> Parsed:
    """Return the request in a plain body of `size` bytes. `max_objects`: bytes of it that may
    become objects.

    Raises:
        TooManyPromptsError: it asks for more than one request may.
        MediaUrlError: it names media that engines are not to fetch.
    """
    if route is _INVOCATIONS:
        return _invocation(fields, size, bounds, max_objects)
    if route is _COMPLETIONS:
        fields.pop(PROMPT_IDS, None)  # engines do not read it there (vLLM 0.32.0)
    make_plain(fields)
    conversations = None
    if route is _BATCH:
        conversations = _conversations(fields, bounds)
        check_media(fields, bounds.media)
    spans = _listed(route, fields, bounds)
    try:
        model = model_name(fields.get("model"))
        stream = read_field(fields, "stream", _bool_decoder) is True
        wants_usage = wants_usage_event(fields, stream)
        if route is _BATCH:
            is_list, prompts, non_text = True, _batch(fields, conversations), False
        else:
            is_list, prompts, non_text = (
                _messages(fields) if route is _CHAT else _prompts(fields, spans)
            )
        if non_text or not MEDIA_KWARGS.isdisjoint(fields):
            check_media(fields, bounds.media)
            if not prompts:  # embeddings
                check_unseen(fields, max_objects)
                unread = _unread(route, fields, bounds)
                return Parsed(
                    route,
                    fields,
                    model,
                    stream,
                    wants_usage,
                    False,
                    (),
                    Alone.NON_TEXT,
                    size,
                    unread=unread,
                )
        alone = Alone.NON_TEXT if non_text else _alone(fields, route)
        if PROMPT_IDS in fields:
            if route is _BATCH:
                raise UnusualError  # engines refuse it
            alone = alone or Alone.PROMPT_IDS
        check_unseen(fields, max_objects)
    except (UnusualError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return unusual_request(route, fields, size, bounds)
    return Parsed(route, fields, model, stream, wants_usage, is_list, prompts, alone, size)


def unusual_request(route: Route, fields: Fields, size: int, bounds: Bounds) -> Parsed:
    """Return a request that one engine alone has to validate.

    Raises:
        TooManyPromptsError: it asks for more than one request may.
    """
    if route is Route.COMPLETIONS:
        fields.pop(PROMPT_IDS, None)
    check_media(fields, bounds.media)
    if route is Route.INVOCATIONS:
        check_lists(Dialect.OPENAI, fields, bounds)
    unread = _unread(route, fields, bounds)
    # wants_usage: an engine may read the request as a stream with usage, and then the client gets
    # that event.
    return Parsed(
        route, fields, model_of(fields), False, True, False, (), Alone.UNUSUAL, size, unread=unread
    )


def _unread(route: Route, fields: Fields, bounds: Bounds) -> int:
    """Return how many prompts or conversations a body has that only an engine reads, 1 at least.

    Raises:
        TooManyPromptsError: there are more than one request may have.
    """
    if route is _CHAT:
        return 1
    listed = {"messages": b"["} if route is _BATCH else {"prompt": b'"[', "prompt_embeds": b'"'}
    limit = bounds.prompts
    return max(
        sum(
            count_in(fields[name], limit, name, each)
            for name, each in listed.items()
            if name in fields
        ),
        1,
    )


def _invocation(fields: Fields, size: int, bounds: Bounds, max_objects: int) -> Parsed:
    """Return an invocation as the chat or the completion that it is, else as a request that one
    engine gets whole.
    """
    for route, fits in (
        (Route.CHAT, client_routes.is_chat),
        (Route.COMPLETIONS, client_routes.is_completion),
    ):
        if fits(fields):
            parsed = interpret(route, fields, size, bounds, max_objects)
            if parsed.alone is not Alone.UNUSUAL:
                return parsed
    return unusual_request(Route.INVOCATIONS, fields, size, bounds)


def _conversations(fields: Fields, bounds: Bounds) -> list[Conversation] | None:
    """Return the conversations of a batch, None if no engine accepts them."""
    if "messages" not in fields:
        return None
    return conversations_in(fields["messages"], bounds.prompts, "messages")


def _batch(fields: Fields, conversations: list[Conversation] | None) -> tuple[Prompt, ...]:
    if not conversations or not client_routes.is_plain_batch(fields):
        raise UnusualError
    prompts = []
    for span, messages in conversations:
        size, non_text = content_of(messages)
        prompts.append(Prompt(part(fields["messages"], span), None, size, len(messages), non_text))
    return tuple(prompts)


def _alone(fields: Fields, route: Route) -> Alone | None:
    present = fields.keys() & _DECIDING
    if present <= _LIMITS:  # as in most requests
        for name in present:
            limit = read_field(fields, name, _int_decoder)
            if limit is not None and limit < 1:
                raise UnusualError
        return None
    n = read_field(fields, "n", _int_decoder)
    if n is not None and n != 1:
        return Alone.N
    if read_field(fields, "echo", _bool_decoder):
        return Alone.ECHO
    if read_field(fields, "prompt_logprobs", _int_decoder) is not None:
        return Alone.PROMPT_LOGPROBS
    if read_field(fields, "use_beam_search", _bool_decoder):
        return Alone.BEAM_SEARCH
    limits = [
        read_field(fields, name, _int_decoder) for name in ("max_tokens", "max_completion_tokens")
    ]
    min_tokens = read_field(fields, "min_tokens", _int_decoder) or 0
    for limit in limits:
        if limit is not None and (limit < 1 or limit < min_tokens):
            raise UnusualError  # every engine refuses it: a prefill would be wasted
    if min_tokens < 0:
        raise UnusualError
    read_field(fields, "return_token_ids", _bool_decoder)
    if route is not _COMPLETIONS:
        logprobs = read_field(fields, "logprobs", _bool_decoder)
        top = read_field(fields, "top_logprobs", _int_decoder)
        if top and not logprobs:
            raise UnusualError
        if read_field(fields, "return_prompt_text", _bool_decoder):
            # a decode engine that gets a chat's ids does not have its text (vLLM 0.32.0)
            return Alone.ECHO
    else:
        logprobs = read_field(fields, "logprobs", _int_decoder) is not None
    if not logprobs and not is_absent(fields, "logprob_token_ids"):
        raise UnusualError
    return None


def _messages(fields: Fields) -> tuple[bool, tuple[Prompt, ...], bool]:
    """Return (is a list, the one prompt, whether any content is not text)."""
    messages = read_field(fields, "messages", _messages_decoder)
    size, non_text = content_of(messages or ())
    return False, (Prompt(None, None, size, len(messages or ())),), non_text


def _listed(route: Route, fields: Fields, bounds: Bounds) -> list[Span] | None:
    """Return where the prompts of a list are, None if there is no list."""
    if route in (Route.CHAT, Route.BATCH):
        return None
    return prompts_in(fields["prompt"], bounds.prompts, "prompt") if "prompt" in fields else None


def _prompts(fields: Fields, spans: list[Span] | None) -> tuple[bool, tuple[Prompt, ...], bool]:
    """Return (is a list, the prompts in order, whether any is not text). `spans`: where the prompts
    of a list are.
    """
    if not is_absent(fields, "prompt_embeds"):
        return False, (), True
    raw = fields.get("prompt")
    if raw is None:
        raise UnusualError
    if spans is None:
        return False, (_one_prompt(raw),), False
    if _HUGE_INT.search(raw):
        raise UnusualError  # engines would already work on the prompts before it when it is refused
    prompts = tuple(_one_prompt(part(raw, span)) for span in spans)
    if len({prompt.tokens is None for prompt in prompts}) != 1:
        raise UnusualError  # texts and token ids mixed
    return True, prompts, False


def _one_prompt(raw: msgspec.Raw) -> Prompt:
    """Return a text or an array of token ids as a prompt."""
    view = bytes(raw)
    if view[:1] == b'"':
        if len(view) == 2:
            raise UnusualError  # empty
        return Prompt(raw, None, len(view) - 2)
    if view[:1] == b"[":
        inside = view[1:-1].lstrip()
        if inside and inside[0] in b"0123456789":
            return Prompt(raw, inside.count(b",") + 1, 0)
    raise UnusualError
