"""A client's request: what routing needs of it is read, and each field of the body stays bytes.

Owns what the routes have in common; what each of them asks for is in `wire.routes`. Every top-level
field is kept as the raw JSON that the client wrote (`msgspec.Raw`), so that unknown fields stay as
they are and a 64 KiB prompt never becomes objects. Fields that the prefill leg rewrites must have
the JSON type of their schema. A request in which one has another type is `unusual`: it goes whole
to one engine, whose own validation answers, and no KV is involved. The same holds for a body that
only the engines' own parser accepts (`wire.lenient_json`): it is parsed, cleaned and encoded again.

`parse_if_quick` reads bodies that take a few milliseconds, `parse` all others, in another process
(`wire.reader_process`).
"""

from __future__ import annotations

import msgspec

from pdproxy.wire import client_routes, lenient_json
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import DEFAULT, SMALL, Body, Bounds, is_quick
from pdproxy.wire.fields import (
    PROMPT_IDS,
    Fields,
    has_value,
    lenient_fields,
    lenient_integer,
    model_of,
    plain_fields,
    read_field,
)
from pdproxy.wire.media import MEDIA_KWARGS, check_media
from pdproxy.wire.model import model_name
from pdproxy.wire.passthrough_body import check_lists
from pdproxy.wire.plain_numbers import make_plain
from pdproxy.wire.prompt_lists import count_in
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone, Prompt
from pdproxy.wire.unusual import NotQuickError, UnusualError, check_unseen, wants_usage_event

# An enum's member is looked up by slow code of its metaclass: these are used for every request.
_INVOCATIONS = Route.INVOCATIONS


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
        """Whether one engine gets the client's own body, on the client's route."""
        return self.alone is not None and self.route.form.goes_whole(self.alone)

    def named(self, leg_id: str) -> Parsed:
        """Return the request with a leg's id in its body, where engines take ids from there."""
        if self.route.form.body_id_prefix is None:
            return self
        fields = self.fields | {"request_id": msgspec.Raw(msgspec.json.encode(leg_id))}
        return msgspec.structs.replace(self, fields=fields)

    def exchange_of(self, index: int) -> tuple[Parsed, Prompt | None]:
        """Return the request and the prompt of the exchange for the prompt at `index` of a list.

        The prompt is None if one engine must get that request as it is.
        """
        prompt = self.prompts[index]
        if self.route is not Route.BATCH or prompt.raw is None:
            return self, prompt
        own = Prompt(None, None, prompt.text_bytes, prompt.messages, media=prompt.media)
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
    def needs_loading(self) -> bool:
        """Whether it can be split only behind a request that loads its prompt's KV, since it wants
        several answers to this prompt.
        """
        return self.alone is Alone.N and len(self.prompts) == 1

    @property
    def has_media(self) -> bool:
        """Whether its only prompt has media."""
        return len(self.prompts) == 1 and bool(self.prompts[0].media)

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
            and self.route.form.returns_ids
            and not self.has_media
            and not self.starts_in_silence
            and ("tools" not in self.fields or self.derenders)
            and not has_value(self.fields, "return_token_ids", b"true")
        )


_bool_decoder = msgspec.json.Decoder(bool | None)
_int_decoder: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)


def limit_of(parsed: Parsed) -> int | None:
    """Return how many tokens an answer may have, None if only an engine knows, or the request says
    what is no number.

    A chat without a limit may fill the context. A completion with null may have the default or fill
    the context: that depends on vLLM's version.
    """
    form = parsed.route.form
    asked = form.asked(parsed.fields)
    for name in form.limits:
        if name in asked:
            try:
                limit = _int_decoder.decode(asked[name])
            except msgspec.DecodeError:
                return lenient_integer(asked[name])
            if limit is not None:
                return limit
    absent = form.limit_if_absent
    return absent if absent is not None and form.limits[0] not in asked else None


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
    form = route.form
    if not form.keeps_prompt_ids:
        fields.pop(PROMPT_IDS, None)
    make_plain(fields)
    if form.checks_all_media:
        check_media(fields, bounds.media)
    try:
        model = model_name(fields.get("model"))
        stream = read_field(fields, "stream", _bool_decoder) is True
        wants_usage = not form.has_usage_event or wants_usage_event(fields, stream)
        prompts, alone, is_list = form.read(fields, bounds)
        has_media = len(prompts) == 1 and prompts[0].media
        if has_media or alone is Alone.NON_TEXT or not MEDIA_KWARGS.isdisjoint(fields):
            check_media(fields, bounds.media)
        unread = 1 if prompts else _unread(route, fields, bounds)
        if PROMPT_IDS in fields:
            alone = Alone.PROMPT_IDS if alone in (None, Alone.N) else alone
        check_unseen(fields, form.unseen, max_objects)
    except (UnusualError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return unusual_request(route, fields, size, bounds)
    return Parsed(
        route, fields, model, stream, wants_usage, is_list, prompts, alone, size, unread=unread
    )


def unusual_request(route: Route, fields: Fields, size: int, bounds: Bounds) -> Parsed:
    """Return a request that one engine alone has to validate.

    Raises:
        TooManyPromptsError: it asks for more than one request may.
    """
    if not route.form.keeps_prompt_ids:
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
    limit = bounds.prompts
    return max(
        sum(
            count_in(fields[name], limit, name, each)
            for name, each in route.form.listed.items()
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
