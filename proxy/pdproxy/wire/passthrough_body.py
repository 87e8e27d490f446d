"""Bodies of the routes that are passed to one engine: read like the generating ones, cleaned, and written anew.

Owns what a Responses request may not ask for: memory. An engine alone remembers nothing that the next engine would know.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import DEFAULT, Body, Bounds
from pdproxy.wire.fields import Fields, model_of, read_fields_light, says
from pdproxy.wire.prompt_lists import prompts_in

_LISTED = ("input", "documents", "text_1", "text_2")
"""Fields of embeddings, classification, scoring and reranking that may be lists of texts or of token ids."""


@dataclass(frozen=True, slots=True)
class PassedBody:
    """A readable body: what goes to the engine, the model it names, and whether a stream is asked for."""

    data: bytes
    model: str | None
    stream: bool


def read_light(dialect: Dialect, body: Body, bounds: Bounds = DEFAULT) -> PassedBody | None:
    """Read a body and write it anew: one reading, so that no engine can find in it what was not seen here.

    None if reading it may take long.

    Raises:
        UnreadableError: it is not a JSON object in UTF-8.
        TooManyPromptsError, TooManyFieldsError: it holds more than one request may.
        BadRequestError: it asks for memory.
    """
    fields = read_fields_light(body)
    if fields is None:
        return None
    check_lists(dialect, fields, bounds)
    return written(dialect, fields)


def check_lists(dialect: Dialect, fields: Fields, bounds: Bounds) -> None:
    """Refuse lists of more texts than one request may have.

    Raises:
        TooManyPromptsError: one is longer.
    """
    if dialect is Dialect.OPENAI:
        for name in _LISTED:
            if name in fields:
                prompts_in(fields[name], bounds.prompts, name)


def written(dialect: Dialect, fields: Fields) -> PassedBody:
    """Return the body that the engine gets.

    Raises:
        BadRequestError: it asks for memory.
    """
    if dialect is Dialect.RESPONSES:
        _forget(fields)
    return PassedBody(msgspec.json.encode(fields), model_of(fields), says(fields, "stream", b"true"))


def _forget(fields: Fields) -> None:
    for name, why in (
        ("previous_response_id", "no response is stored: send the whole conversation as `input`"),
        ("conversation", "no conversation is stored: send the whole of it as `input`"),
        ("background", "no response is stored to be fetched later"),
    ):
        if not _empty(fields, name):
            raise BadRequestError(f"`{name}` is not supported: {why}", param=name)
        fields.pop(name, None)
    if not _empty(fields, "store"):
        raise BadRequestError("`store` is not supported: no response is stored", param="store")
    # vLLM's default is true: an engine that is set to store would keep every response for ever.
    fields["store"] = msgspec.Raw(b"false")


def _empty(fields: Fields, name: str) -> bool:
    return name not in fields or says(fields, name, b"null") or says(fields, name, b"false")
