"""Bodies of the routes that are passed to one engine: read like those of generating routes,
cleaned, and encoded again.

Also the bodies of requests of generating routes that one engine gets whole. What becomes of a
request that asks for storage is in `wire.routes.responses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import DEFAULT, Body, Bounds
from pdproxy.wire.fields import (
    PROMPT_IDS,
    Fields,
    has_value,
    model_of,
    read_fields_if_quick,
)
from pdproxy.wire.lenient_json import JSON_MEDIA_TYPE
from pdproxy.wire.media import check_media
from pdproxy.wire.prompt_lists import count_in

TRUE_TEXTS = frozenset({"1", "true", "t", "yes", "y", "on"})
"""What vLLM takes for true, in small letters."""
_ANY = b'"[{'
_LISTED = {
    "input": b'"[',
    "messages": b"[",
    "documents": _ANY,
    "items": _ANY,
    "queries": _ANY,
    "data_1": _ANY,
    "data_2": _ANY,
    "text_1": _ANY,
    "text_2": _ANY,
}
"""Fields of embeddings, classification, scoring and reranking that may be lists of texts, token
ids, conversations, or objects with the parts of a text; and how a list of several begins, as in
`count_in`.
"""


_PAIRS = (
    ("query", "documents"),
    ("query", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
"""Fields of scores and rankings: a text that engines read with each of a list, and this list."""


class Pairs(NamedTuple):
    """How often an engine may read one text of a body, with another one each time; and the bytes of
    this text.
    """

    times: int = 1
    size: int = 0


NO_PAIRS = Pairs()

Rename = Callable[[str | None, Fields], str | None]
"""Returns the engine's name of a model, for the client's and the body's fields."""
Salt = Callable[[Fields], None]
"""Sees to a body's `cache_salt`, as `wire.cache_salt` does."""


@dataclass(frozen=True, slots=True)
class PassedBody:
    """A readable body: what goes to the engine, the model it names, and whether a stream is asked
    for.

    `unknown_id`: the name that was put in the place of `previous_response_id`, so that no engine
    can run a request in the background; None if the client did not ask for that. `limit`: the most
    tokens of the answer, None if the body names none. `work`: the bytes of text that take as much
    work, None: as many as it has. `parts`: what it is known by, None: its fields.
    """

    data: Body
    model: str | None
    stream: bool
    unknown_id: str | None = None
    limit: int | None = None
    pairs: Pairs = NO_PAIRS
    content_type: bytes = JSON_MEDIA_TYPE.encode()
    work: int | None = None
    parts: Fields | None = None
    _shared: int = 0
    _own_rest: bytes = b""

    @property
    def size(self) -> int:
        """How much work it is, in bytes of text."""
        return len(self.data) if self.work is None else self.work

    @property
    def own(self) -> Body | None:
        """The body as the client wrote it, None if `data` is that. Only an engine that refuses
        `data` by its schema may get it.

        Such an engine refuses this, too, and its text counts the client's fields.
        """
        return self.data[: self._shared] + self._own_rest if self._own_rest else None


NO_BODY = PassedBody(b"", None, False)
"""Of a request without one."""


def read_if_quick(
    dialect: Dialect,
    body: Body,
    bounds: Bounds = DEFAULT,
    name: Rename | None = None,
    salt: Salt | None = None,
) -> PassedBody | None:
    """Read a body and encode it again, so that an engine can find nothing in it that was not seen
    here.

    None if reading it may take long. `name`, `salt`: see `passed_body`.

    Raises:
        UnreadableError: it is not a JSON object in UTF-8.
        TooManyPromptsError, TooManyFieldsError: it holds more than one request may.
        MediaUrlError: it names media that engines are not to fetch.
    """
    fields = read_fields_if_quick(body)
    if fields is None:
        return None
    pairs = check_lists(dialect, fields, bounds)
    check_media(fields, bounds.media)
    return passed_body(dialect, fields, pairs, name, salt)


def check_lists(dialect: Dialect, fields: Fields, bounds: Bounds) -> Pairs:
    """Refuse lists of more texts or conversations than one request may have. Return what engines
    may read in pairs.

    Raises:
        TooManyPromptsError: one is longer.
    """
    if dialect is not Dialect.OPENAI:
        return NO_PAIRS
    counts = {
        name: count_in(fields[name], bounds.prompts, name, each)
        for name, each in _LISTED.items()
        if name in fields
    }
    found = [
        Pairs(counts[many], memoryview(fields[one]).nbytes)
        for one, many in _PAIRS
        if one in fields and many in counts and counts.get(one, 1) <= 1  # else each has its own
    ]
    return max(found, key=lambda pairs: pairs.times * pairs.size, default=NO_PAIRS)


def passed_body(
    dialect: Dialect,
    fields: Fields,
    pairs: Pairs = NO_PAIRS,
    name: Rename | None = None,
    salt: Salt | None = None,
) -> PassedBody:
    """Return the body that the engine gets. `name`: see `Rename`; None: the engine's name is the
    client's.

    `pairs`: what `check_lists` has found; `salt`: see `Salt`; None: no prompt is computed for it.

    Raises:
        BadRequestError: its salt is wrong.
    """
    if salt is not None:
        salt(fields)
    model, stream = model_of(fields), has_value(fields, "stream", b"true")
    if name is not None and (known := name(model, fields)) != model:
        model = known
        fields["model"] = msgspec.Raw(msgspec.json.encode(known))
    if dialect is Dialect.OPENAI:
        fields.pop(PROMPT_IDS, None)
    return PassedBody(msgspec.json.encode(fields), model, stream, pairs=pairs)


def whole_body(fields: Fields, model: str | None) -> PassedBody:
    """Return the client's own body, for one engine that gets a request of a generating route
    whole.
    """
    return PassedBody(msgspec.json.encode(fields), model, has_value(fields, "stream", b"true"))


def changed_body(
    fields: Fields, model: str | None, changed: Fields, unknown_id: str | None
) -> PassedBody:
    """Do the same with other values of some fields. An engine that refuses these by its schema gets
    the client's. `unknown_id`: as in `PassedBody`.
    """
    stream = has_value(fields, "stream", b"true")
    own = {name: fields.pop(name) for name in changed if name in fields}
    shared = msgspec.json.encode(fields).removesuffix(b"}")
    data = shared + _rest(shared, changed)
    rest = _rest(shared, own) if changed else b""
    return PassedBody(data, model, stream, unknown_id, _shared=len(shared), _own_rest=rest)


def _rest(shared: bytes, fields: Fields) -> bytes:
    """Return the end of a JSON object that begins with `shared`."""
    rest = msgspec.json.encode(fields).removeprefix(b"{")
    return b"," + rest if len(shared) > 1 and fields else rest
