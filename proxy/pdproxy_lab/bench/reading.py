"""Reads the options of `pdproxy bench`. Each function raises ValueError with one line for the
user.
"""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdproxy_lab.bench.arrivals import MAX_RATE
from pdproxy_lab.bench.prompts import OWN_FIELDS
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.bench.trace import MAX_TOKENS
from pdproxy_lab.bench.workload import Lengths, RequestClass

MAX_SERVERS = 8
MAX_RATES = 16
"""Of a sweep."""
MAX_CLASSES = 8
MAX_EXTRA = 65_536
"""Bytes of --extra-body."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_OURS = frozenset(
    {
        "content-type",
        "content-length",
        "accept",
        "accept-encoding",
        "host",
        "transfer-encoding",
        "connection",
    }
)


class Address(msgspec.Struct, frozen=True):
    """A server as the user named it. The URL has no `/` and no `/v1` at its end."""

    name: str
    url: str


def server(text: str) -> Address:
    """Read `URL` or `NAME=URL`. Without a scheme it is http; a `/v1` at the end is left out."""
    name, equals, rest = text.partition("=")
    named = bool(equals) and _NAME.fullmatch(name) is not None
    url = rest if named else text
    url = url if "://" in url else f"http://{url}"
    wrong = f"expected [NAME=]http://HOST:PORT, got {text[:80]!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(wrong) from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or port == 0
    ):
        raise ValueError(wrong)
    if parts.username is not None or not url.isprintable() or " " in url or len(url) > 2048:
        raise ValueError(wrong)
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(name if named else url.partition("://")[2][:64], url)


def servers(found: list[Address]) -> tuple[Address, ...]:
    """Check all servers together: not too many, no name twice."""
    if len(found) > MAX_SERVERS:
        raise ValueError(f"{len(found)} servers: {MAX_SERVERS} at most")
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two servers have the name {twice}: give them names, NAME=URL")
    return tuple(found)


def lengths(text: str) -> Lengths:
    """Read a number of tokens, or `A:B` for a range."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()) or len(text) > 20:
        raise ValueError(f"expected a number of tokens or A:B, got {text[:40]!r}")
    made = Lengths(int(low), int(high) if colon else int(low))
    if not 1 <= made.low <= made.high <= MAX_TOKENS:
        raise ValueError(
            f"expected 1 to {MAX_TOKENS} tokens, the lower number first, got {text[:40]!r}"
        )
    return made


def token_ids(text: str) -> Lengths:
    """Read a range of token ids, `A:B`."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or not high.isdecimal() or not int(low[:9]) < int(high[:9]) <= 1_000_000:
        raise ValueError(
            f"expected two token ids A:B below 1000000, the lower one first, got {text[:40]!r}"
        )
    return Lengths(int(low), int(high))


def request_class(text: str) -> RequestClass:
    """Read `NAME:share=0.5,input=A:B,output=N,ttft=500ms,tpot=15ms`, all but the name optional."""
    name, _, rest = text.partition(":")
    found: dict[str, str] = {}
    limits = []
    for part in rest.split(",") if rest else ():
        key, _, value = part.strip().partition("=")
        if key not in ("share", "input", "output"):
            limits.append(part)
        elif key in found:
            raise ValueError(f"{key} is there twice: {text[:80]!r}")
        else:
            found[key] = value
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name has 1 to 32 letters, digits, '.', '_' or '-', got {name[:40]!r}")
    return RequestClass(
        name=name,
        share=_number(found["share"], text, 0.0, 1e6, "share=") if "share" in found else None,
        inputs=lengths(found["input"]) if "input" in found else None,
        outputs=lengths(found["output"]) if "output" in found else None,
        slo=parse_slo(f"{name}:{','.join(limits)}", name) if limits else None,
    )


def rate(text: str) -> tuple[float, float | None]:
    """Read requests per second, or `A:B` for a ramp."""
    low, colon, high = text.partition(":")
    found = [_number(part, text, 0.0, MAX_RATE) for part in ((low, high) if colon else (low,))]
    return found[0], found[1] if colon else None


def sweep(text: str) -> tuple[float, ...]:
    """Read the rates of a sweep, `A,B,...`, or `A:B:STEP` with both ends. Returned ascending."""
    if ":" in text:
        parts = text.split(":")
        if len(parts) != 3:
            raise ValueError(f"expected rates A,B,... or A:B:STEP, got {text[:40]!r}")
        low, high, step = (_number(part, text, 0.0, MAX_RATE) for part in parts)
        # beyond the limit only by one: a step may be tiny
        count = min(math.floor((high - low) / step + 1e-9), MAX_RATES) + 1 if low <= high else 0
        rates = [round(low + index * step, 9) for index in range(count)]
    else:
        parts = text.split(",")[: MAX_RATES + 1]
        rates = [_number(part, text, 0.0, MAX_RATE) for part in parts]
    if not 2 <= len(rates) <= MAX_RATES:
        raise ValueError(f"expected 2 to {MAX_RATES} rates, got {text[:40]!r}")
    if len(set(rates)) < len(rates):
        raise ValueError(f"a rate is there twice: {text[:40]!r}")
    return tuple(sorted(rates))


def number(low: float, high: float, what: str) -> Any:
    """Return a reader of numbers above `low` and up to `high`."""

    def read(text: str) -> float:
        return _number(text, text, low, high, what)

    return read


def whole(low: int, high: int) -> Any:
    """Return a reader of whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 12 or not low <= int(text) <= high:
            raise ValueError(f"expected {low} to {high}, got {text[:40]!r}")
        return int(text)

    return read


def window(text: str) -> tuple[float, float]:
    """Read a slice of a trace, `A:B` in seconds."""
    low, _, high = text.partition(":")
    start = 0.0 if low == "0" else _number(low, text, 0.0, 1e12, "seconds A:B")
    end = _number(high, text, 0.0, 1e12, "seconds A:B")
    if start >= end:
        raise ValueError(f"expected seconds A:B, the lower number first, got {text[:40]!r}")
    return start, end


def header(text: str) -> tuple[str, str]:
    """Read `Name: value`. The name is returned in lower case."""
    name, colon, value = text.partition(":")
    value = value.strip()
    if (
        not colon
        or not _HEADER_NAME.fullmatch(name)
        or not (value.isprintable() and value.isascii())
        or len(value) > 8192
    ):
        # the value may be a secret: it isn't shown
        raise ValueError("expected 'Name: value' of printable ASCII")
    return header_name(name), value


def header_name(text: str) -> str:
    """Read a header's name, and return it in lower case."""
    if not _HEADER_NAME.fullmatch(text):
        raise ValueError("expected a header's name")
    if text.lower() in _OURS:
        raise ValueError(f"{text} is set by pdproxy itself")
    return text.lower()


def extra_body(text: str) -> dict[str, Any]:
    """Read a JSON object of fields for each request."""
    try:
        found = msgspec.json.decode(text[: MAX_EXTRA + 1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or len(text) > MAX_EXTRA:
        raise ValueError(f"expected a JSON object of at most {MAX_EXTRA} bytes")
    if own := sorted(OWN_FIELDS & found.keys()):
        raise ValueError(f"{own[0]} is set by pdproxy itself")
    return found


def _number(
    part: str, text: str, low: float, high: float, what: str = "requests per second"
) -> float:
    try:
        value = float(part)
    except ValueError:
        value = low
    if not low < value <= high:
        raise ValueError(f"expected {what} above {low:g} and at most {high:g}, got {text[:40]!r}")
    return value
