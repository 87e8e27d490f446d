"""What a key lets a request's body ask for: `max_tokens` and `n`. A body that names no limit of
tokens gets the key's. Pure.

vLLM reads more forms of a number than JSON's integers: text, and fractions of zero. These are
refused here, so that nobody can write a number in a way in which only an engine reads it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdproxy.kit.errors import ForbiddenError
from pdproxy.serving.access.routes import RouteEntry
from pdproxy.settings.keys import KeyRights
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.continuable import COMPLETION_TOKENS
from pdproxy.wire.fields import Fields, is_absent
from pdproxy.wire.request import Parsed, Route
from pdproxy.wire.speech_body import BEAMS, LIMIT

_NUMBER_BYTES = 20
_integer: msgspec.json.Decoder[int] = msgspec.json.Decoder(int)
_TOKENS = {Dialect.RESPONSES: ("max_output_tokens",), Dialect.MESSAGES: ("max_tokens",)}
"""The fields that limit an answer's tokens, by the API of a route that one engine serves whole."""
_ANSWERS = ("n", "best_of")


def bound_request(rights: KeyRights, parsed: Parsed) -> None:
    """Check a generating request, and put the key's limit of tokens into its fields if it has none.

    Raises:
        ForbiddenError: it asks for more than the key is good for.
    """
    fields = parsed.fields
    if rights.n is not None:
        if not parsed.prompts:
            raise ForbiddenError(
                "This API key has a limit of answers (n), and this body's can't be counted.",
                param="n",
            )
        each = max(_largest(fields, _ANSWERS, rights.n, "n"), 1)
        if each * len(parsed.prompts) > rights.n:
            text = (
                f"This API key is good for {rights.n} answers to one request, to all of its "
                f"prompts together."
            )
            raise ForbiddenError(text, param="n")
    if (most := rights.max_tokens) is not None:
        is_completion = parsed.route is Route.COMPLETIONS
        if is_completion and "max_tokens" not in fields and most >= COMPLETION_TOKENS:
            return  # that is the limit then
        _bound_tokens(fields, ("max_tokens", "max_completion_tokens"), most, "max_tokens")
        if is_completion or parsed.route is Route.INVOCATIONS:  # a completion has only this field
            _bound_tokens(fields, ("max_tokens",), most, "max_tokens")


def bound_passed(rights: KeyRights, entry: RouteEntry, fields: Fields) -> None:
    """Do the same with the body of a request that one engine serves whole. It has one answer, or
    none; one of speech may have its beams counted as answers.

    Raises:
        ForbiddenError: it asks for more than the key is good for.
    """
    names = (LIMIT,) if entry.form else _TOKENS.get(entry.dialect)
    if rights.max_tokens is not None and names is not None:
        _bound_tokens(fields, names, rights.max_tokens, names[0])
    if rights.n is not None and entry.form:
        _largest(fields, (BEAMS,), rights.n, "n")


def _bound_tokens(fields: Fields, names: Iterable[str], most: int, usual: str) -> None:
    if all(is_absent(fields, name) for name in names):
        fields[usual] = msgspec.Raw(b"%d" % most)
    else:
        _largest(fields, names, most, "max_tokens")


def _largest(fields: Fields, names: Iterable[str], most: int, right: str) -> int:
    """Return the largest of fields, 0 if there is none. Raises ForbiddenError: one is no integer,
    or above `most`.
    """
    largest = 0
    for name in names:
        if is_absent(fields, name):
            continue
        value = _number(fields[name])
        if value is None or value > most:
            text = (
                f"This API key is good for {right} up to {most}: `{name}` must be an integer up "
                f"to that."
            )
            raise ForbiddenError(text, param=name)
        largest = max(largest, value)
    return largest


def _number(raw: msgspec.Raw) -> int | None:
    if memoryview(raw).nbytes > _NUMBER_BYTES:
        return None
    try:
        return _integer.decode(raw)
    except msgspec.DecodeError:
        return None
