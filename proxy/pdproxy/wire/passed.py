"""Bodies of the routes that are passed to one engine: read like the generating ones, cleaned, and written anew.

Owns what a Responses request may not ask for: memory. An engine alone remembers nothing that the next engine would know.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.dialects import Dialect
from pdproxy.wire.request import Fields, model_of, read_fields

_EMPTY = frozenset((b"null", b"false"))


@dataclass(frozen=True, slots=True)
class PassedBody:
    """A readable body: what goes to the engine, the model it names, and whether a stream is asked for."""

    data: bytes
    model: str | None
    stream: bool


def read(dialect: Dialect, body: bytes) -> PassedBody:
    """Read a body and write it anew: one reading, so that no engine can find in it what was not seen here.

    Raises:
        UnreadableError: it is not a JSON object in UTF-8.
        BadRequestError: it asks for memory.
    """
    fields = read_fields(body)
    if dialect is Dialect.RESPONSES:
        _forget(fields)
    stream = bytes(fields.get("stream", msgspec.Raw(b"false"))) == b"true"
    return PassedBody(msgspec.json.encode(fields), model_of(fields), stream)


def _forget(fields: Fields) -> None:
    for name, why in (
        ("previous_response_id", "no response is stored: send the whole conversation as `input`"),
        ("conversation", "no conversation is stored: send the whole of it as `input`"),
        ("background", "no response is stored to be fetched later"),
    ):
        if bytes(fields.get(name, msgspec.Raw(b"null"))) not in _EMPTY:
            raise BadRequestError(f"`{name}` is not supported: {why}", param=name)
        fields.pop(name, None)
    if bytes(fields.get("store", msgspec.Raw(b"null"))) not in _EMPTY:
        raise BadRequestError("`store` is not supported: no response is stored", param="store")
    # vLLM's default is true: an engine that is set to store would keep every response for ever.
    fields["store"] = msgspec.Raw(b"false")
