"""What a client's key is good for: words of its line in the file of keys.

    models=llama-*,qwen pools=default routes=chat,completions tenants=a,b max_tokens=4096 n=4 until=2027-01-31T00:00:00Z

Owns the grammar of these words. No error quotes a value: a line may be wrong in any way, and any part of it may be a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

MOST_NAMES = 256
"""Names of one word: each is compared with a request's."""
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+-][0-9]{2}:[0-9]{2})")
_WHOLE = re.compile(r"[0-9]{1,12}")


class KeyRights(msgspec.Struct, frozen=True):
    """What requests with one key may ask for. None: anything.

    `models`: names that engines know, or patterns with one `*`; `pools`, `routes`, `tenants`: names. `max_tokens`: of one answer;
    `n`: answers to one request, to all of its prompts together. `until`: when the key ends, in Unix seconds.
    """

    models: tuple[str, ...] | None = None
    pools: tuple[str, ...] | None = None
    routes: tuple[str, ...] | None = None
    tenants: tuple[str, ...] | None = None
    max_tokens: int | None = None
    n: int | None = None
    until: float | None = None


ALL_RIGHTS = KeyRights()


def whole(name: str, value: str) -> int:
    """Return a whole number of 1 or more. Raises ValueError with what is wrong, which follows "line 5", as the others do."""
    if not _WHOLE.fullmatch(value) or int(value) < 1:
        raise ValueError(f"has a wrong {name}: expected a whole number, 1 or more")
    return int(value)


def _names(name: str, value: str) -> tuple[str, ...]:
    found = tuple(value.split(","))
    if not all(found) or len(found) > MOST_NAMES:
        raise ValueError(f"has a wrong {name}: expected up to {MOST_NAMES} names with commas between them")
    return found


def _patterns(name: str, value: str) -> tuple[str, ...]:
    found = _names(name, value)
    if any(one.count("*") > 1 for one in found):
        raise ValueError(f"has a wrong {name}: a pattern has one * at most")
    return found


def _time(name: str, value: str) -> float:
    try:
        if _TIME.fullmatch(value):
            return datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"has a wrong {name}: expected a time with its zone, such as 2027-01-31T00:00:00Z")


RIGHTS: dict[str, Callable[[str, str], Any]] = {
    "models": _patterns,
    "pools": _names,
    "routes": _names,
    "tenants": _names,
    "max_tokens": whole,
    "n": whole,
    "until": _time,
}
"""For each word, what reads its value."""
