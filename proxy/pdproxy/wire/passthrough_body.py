"""Bodies of the routes that are passed to one engine: read like those of generating routes, cleaned, and encoded again.

Owns what a Responses request may not ask for: stored responses. The next request may go to an engine that does not have them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import DEFAULT, Body, Bounds
from pdproxy.wire.fields import Fields, has_value, model_of, read_fields_if_quick
from pdproxy.wire.prompt_lists import prompts_in

_LISTED = ("input", "documents", "text_1", "text_2", "items")
"""Fields of embeddings, classification, scoring and reranking that may be lists of texts or of token ids."""


@dataclass(frozen=True, slots=True)
class PassedBody:
    """A readable body: what goes to the engine, the model it names, and whether a stream is asked for."""

    data: bytes
    model: str | None
    stream: bool


NO_BODY = PassedBody(b"", None, False)
"""Of a request without one."""


def read_if_quick(dialect: Dialect, body: Body, bounds: Bounds = DEFAULT) -> PassedBody | None:
    """Read a body and encode it again, so that an engine can find nothing in it that was not seen here.

    None if reading it may take long.

    Raises:
        UnreadableError: it is not a JSON object in UTF-8.
        TooManyPromptsError, TooManyFieldsError: it holds more than one request may.
        BadRequestError: it asks for stored responses.
    """
    fields = read_fields_if_quick(body)
    if fields is None:
        return None
    check_lists(dialect, fields, bounds)
    return passed_body(dialect, fields)


def check_lists(dialect: Dialect, fields: Fields, bounds: Bounds) -> None:
    """Refuse lists of more texts than one request may have.

    Raises:
        TooManyPromptsError: one is longer.
    """
    if dialect is Dialect.OPENAI:
        for name in _LISTED:
            if name in fields:
                prompts_in(fields[name], bounds.prompts, name)


def passed_body(dialect: Dialect, fields: Fields) -> PassedBody:
    """Return the body that the engine gets.

    Raises:
        BadRequestError: it asks for stored responses.
    """
    if dialect is Dialect.RESPONSES:
        _refuse_storage(fields)
    return PassedBody(msgspec.json.encode(fields), model_of(fields), has_value(fields, "stream", b"true"))


def _refuse_storage(fields: Fields) -> None:
    for name, why in (
        ("previous_response_id", "no response is stored: send the whole conversation as `input`"),
        ("conversation", "no conversation is stored: send the whole of it as `input`"),
        ("background", "no response is stored to be fetched later"),
    ):
        if not _is_unset(fields, name):
            raise BadRequestError(f"`{name}` is not supported: {why}", param=name)
        fields.pop(name, None)
    if not _is_unset(fields, "store"):
        raise BadRequestError("`store` is not supported: no response is stored", param="store")
    # vLLM's default is true: an engine that is set to store would keep every response until it ends.
    fields["store"] = msgspec.Raw(b"false")


def _is_unset(fields: Fields, name: str) -> bool:
    return name not in fields or has_value(fields, name, b"null") or has_value(fields, name, b"false")
