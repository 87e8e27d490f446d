"""What requests to the admin API bring: bodies and queries, read within bounds. Owns what is
refused in them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from starlette.requests import ClientDisconnect, Request

from pdproxy.kit.errors import BadRequestError, BodyTooLargeError
from pdproxy.settings.errors import did_you_mean, quote

MAX_BODY = 65_536
"""Bytes of a body: an engine's settings have hundreds."""
_WORDS = {"true": True, "1": True, "false": False, "0": False}


async def body_of(request: Request) -> dict[str, Any]:
    """Return the object that a request's body is, an empty one if there is no body.

    Raises:
        BadRequestError: it is no JSON object, gives a name twice, or is not complete.
        BodyTooLargeError: it is over `MAX_BODY`.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise BodyTooLargeError(f"The body is larger than {MAX_BODY} bytes")
    except ClientDisconnect:  # or it was too slow, and has its answer
        raise BadRequestError("the body is not complete") from None
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequestError("expected a body of content-type application/json")
    try:
        found = json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, _TwiceError):
            raise BadRequestError(str(error)) from None
        raise BadRequestError("the body is no JSON") from None
    if not isinstance(found, dict):
        raise BadRequestError("expected a JSON object")
    return found


class _TwiceError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(
            f"{quote(next(one for one in names if names.count(one) > 1))} is given twice"
        )
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def query_of(request: Request, names: Collection[str]) -> dict[str, str]:
    """Return a request's query. Raises BadRequestError for a name that is none of `names`, or is
    given twice.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise BadRequestError(f"unknown parameter {quote(name)}{did_you_mean(name, names)}")
        if name in found:
            raise BadRequestError(f"{name} is given twice")
        found[name] = value
    return found


def flag_of(query: dict[str, str], name: str, *, usual: bool) -> bool:
    """Return a parameter that is true or false."""
    if name not in query:
        return usual
    found = _WORDS.get(query[name].lower())
    if found is None:
        raise BadRequestError(f"{name}: expected true or false, got {quote(query[name])}")
    return found


def number_of(
    query: dict[str, str], name: str, most: float, *, whole: bool = False
) -> float | None:
    """Return a parameter that is a number from 0 to `most`, None if it is not given."""
    if name not in query:
        return None
    try:
        found = int(query[name]) if whole else float(query[name])
    except ValueError:
        found = -1
    if not 0 <= found <= most:
        raise BadRequestError(
            f"{name}: expected a number from 0 to {most:g}, got {quote(query[name])}"
        )
    return found
