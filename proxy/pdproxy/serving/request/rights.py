"""What a key lets a request's body ask for: `max_tokens` and `n`. A body that names no limit of
tokens gets the key's. Pure.

vLLM reads more forms of a number than JSON's integers: text, and fractions of zero. These are
refused here, so that nobody can write a number in a way in which only an engine reads it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdproxy.kit.errors import ForbiddenError
from pdproxy.settings.keys import KeyRights
from pdproxy.wire.fields import Fields, inner_fields, is_absent
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.speech_body import BEAMS, LIMIT

_NUMBER_BYTES = 20
_integer: msgspec.json.Decoder[int] = msgspec.json.Decoder(int)


def bound_request(rights: KeyRights, parsed: Parsed) -> None:
    """Check a generating request, and put the key's limit of tokens into its fields if it has none.

    Raises:
        ForbiddenError: it asks for more than the key is good for.
    """
    name = parsed.route.form.asks_in
    fields = parsed.fields if name is None else inner_fields(parsed.fields, name)
    if fields is None:
        if rights.n is not None or rights.max_tokens is not None:
            raise ForbiddenError(
                f"This API key has limits, and the `{name}` of this body can't be read.", param=name
            )
        return
    _bound(rights, parsed, fields)
    if name is not None:
        parsed.fields[name] = msgspec.Raw(msgspec.json.encode(fields))


def _bound(rights: KeyRights, parsed: Parsed, fields: Fields) -> None:
    form = parsed.route.form
    if rights.n is not None and form.answers:
        if not parsed.prompts:
            raise ForbiddenError(
                "This API key has a limit of answers (n), and this body's can't be counted.",
                param="n",
            )
        each = max(_largest(fields, form.answers, rights.n, "n"), 1)
        if each * len(parsed.prompts) > rights.n:
            text = (
                f"This API key is good for {rights.n} answers to one request, to all of its "
                f"prompts together."
            )
            raise ForbiddenError(text, param="n")
    if (most := rights.max_tokens) is not None:
        absent = form.limit_if_absent
        if absent is not None and form.limits[0] not in fields and most >= absent:
            return  # that is the limit then
        if form.answers:
            _bound_tokens(fields, ("max_tokens", "max_completion_tokens"), most, "max_tokens")
            if form.limits == ("max_tokens",) or parsed.route is Route.INVOCATIONS:
                _bound_tokens(fields, ("max_tokens",), most, "max_tokens")
        else:
            _bound_tokens(fields, form.limits, most, form.limits[0])


def bound_speech(rights: KeyRights, fields: Fields) -> None:
    """Do the same with the fields of a form for speech. The beams of a search count as answers.

    Raises:
        ForbiddenError: it asks for more than the key is good for.
    """
    if rights.max_tokens is not None:
        _bound_tokens(fields, (LIMIT,), rights.max_tokens, LIMIT)
    if rights.n is not None:
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
