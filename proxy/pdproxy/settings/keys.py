"""Who clients, operators and tenants are: the sections `auth` and `tenants`, and the lines of the
files of keys.

    team-a:sk-1234 inflight=20 rpm=600 tpm=200000 weight=3 priority=0..10 models=llama-*
    until=2027-01-31T00:00:00Z ops:sk-5678 read-only

The first line is a client's: a key alone, or `name:key` with limits of all keys of its name, and
with what this key is good for:

    models=llama-*,qwen pools=default routes=chat,completions tenants=a,b max_tokens=4096 n=4
    until=2027-01-31T00:00:00Z

The second line is an operator's. Owns their grammar. No error quotes a line or a value: a line may
be wrong in any way, and any part of it may be a key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdproxy.settings.errors import MASK, Mistakes, SettingsError
from pdproxy.settings.files import read_key, read_lines, spell_file
from pdproxy.settings.section import HIDDEN, AtOnce, File, Key, Option, Section

Caches = Literal["auto", "separate", "shared"]
AUTO, SEPARATE, SHARED = "auto", "separate", "shared"
MIN_SECRET = 32
"""Characters: as many as 16 random bytes have in hexadecimal digits."""
Secret = Annotated[
    str,
    Meta(
        pattern=rf"\A[\x21-\x7e]{{{MIN_SECRET},}}\Z",
        description="32 or more visible ASCII characters without blanks",
        extra={HIDDEN: True},
    ),
]
Digest = Annotated[
    str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description="64 hexadecimal digits in small letters")
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
MOST_WEIGHT = 1000.0
_NO_KEY = "is no key of visible ASCII characters without blanks"
READ_ONLY = "read-only"
"""The word behind a key of operators that may change nothing."""

MOST_NAMES = 256
"""Names of one word: each is compared with a request's."""
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+-][0-9]{2}:[0-9]{2})"
)
_WHOLE = re.compile(r"[0-9]{1,12}")


class Auth(Section, frozen=True):
    """Keys of clients, and the proxy's key for the engines.

    `pdproxy config print` masks keys; logs never contain them. Every route under /v1 requires a
    key, before the body is read. /health and /ready need none; for /metrics, /version and others
    see listen.operator_routes.
    """

    api_keys: AtOnce[tuple[Key, ...]] = ()
    """Keys of clients. If any is set, a client's `Authorization: Bearer ...` is checked and not
    forwarded. If none is set, the header is forwarded, and the engines decide. Prefer the variable
    PDPROXY_AUTH__API_KEYS, comma separated, to this file.
    """

    api_keys_file: Annotated[
        AtOnce[File | None],
        Option(
            "the keys that clients may send, one per line (default: no key is checked here)",
            "FILE",
            "--api-keys-file",
        ),
    ] = None
    """A file with more keys, one per line (--api-keys-file): a key alone, or name:key with limits
    for all keys of that name: requests at once, requests and tokens per minute, a weight,
    priorities (inflight=20 rpm=600 tpm=200000 weight=3 priority=0..10), and with what this key is
    good for (models=llama-*,qwen pools=default routes=chat,completions tenants=a max_tokens=4096
    n=4 until=2027-01-31T00:00:00Z). Blank lines and lines that begin with # are skipped. It is
    checked once per second, and added or removed keys take effect then. A file that is missing,
    empty or invalid is an error at the start. Later, the old keys stay in force if the file is
    missing or invalid; if it holds no key, no key of it is valid. The log and /ready report both.
    null: none.
    """

    engine_api_key: AtOnce[Key | None] = None
    """Key for the engines (their --api-key). Probes send it as a bearer token; so do requests of
    clients that sent one of api_keys. Without api_keys a client's own Authorization is forwarded
    instead. null: the engines need no key.
    """

    engine_api_key_file: Annotated[
        AtOnce[File | None],
        Option(
            "the one key that the engines were started with (default: none)",
            "FILE",
            "--engine-api-key-file",
        ),
    ] = None
    """The same, from a file that holds one key (--engine-api-key-file), read again when it changes.
    null: none.
    """

    admin_keys: AtOnce[tuple[Key, ...]] = ()
    """Keys for the admin API (listen.admin), sent as `Authorization: Bearer ...`. Keys of clients
    do not open it. Who has one can send prompts and the engines' key to any address, by adding an
    engine there. Without any, a Unix socket and the loopback need none.
    """

    admin_keys_file: Annotated[
        AtOnce[File | None],
        Option(
            "the keys for the admin API, one per line (default: a Unix socket and the loopback "
            "need none)",
            "FILE",
            "--admin-keys-file",
        ),
    ] = None
    """A file with more of them, one per line (--admin-keys-file): a key alone, or name:key; the log
    shows the name. `name:key read-only` changes nothing. It is checked once per second. A key that
    is a client's, too, is an error at the start, and does not open the admin API later; so is a key
    of engines. null: none.
    """

    reader_key_digests: AtOnce[tuple[Digest, ...]] = ()
    """SHA-256 digests of keys, in hexadecimal digits: a key with one of them opens at the clients'
    port what is for operators (listen.operator_routes), such as /metrics, and nothing else. For
    keys that must not be in these settings or beside them. A key needs 32 or more random
    characters: who sees a digest can try keys.
    """

    @property
    def wants_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def wants_admin_keys(self) -> bool:
        """Whether operators need a key."""
        return bool(self.admin_keys) or self.admin_keys_file is not None

    def __repr__(self) -> str:
        # Settings appear in logs and tracebacks; keys must not.
        key = "set" if self.engine_api_key or self.engine_api_key_file else "not set"
        return f"Auth(<{len(self.api_keys)} api_keys>, <engine_api_key {key}>)"


class TenantSettings(Section, frozen=True):
    """Whether tenants share engines' caches. A tenant is a name of keys, or a key without a name;
    without keys, an address.
    """

    caches: AtOnce[Caches] = "auto"
    """separate: engines find in their prefix caches only what the same tenant has sent. shared:
    also what others have sent, and who measures times or reads cached_tokens can guess their
    prompts. auto: separate where keys of several tenants are valid, or overload.tenant_header is
    set.
    """

    secret: Secret | None = None
    """The key of the hash that makes tenants' salts, 32 or more characters (openssl rand -hex 32).
    Replicas need the same one to use each other's caches. null, without secret_file: a random one,
    new at each start, so that all caches begin anew.
    """

    secret_file: File | None = None
    """A file that holds it. Read again when it changes: then all caches begin anew."""

    def __repr__(self) -> str:
        # Settings appear in logs and tracebacks; secrets must not.
        return (
            f"TenantSettings({self.caches}, <secret "
            f"{'set' if self.secret or self.secret_file else 'not set'}>)"
        )


def check_auth(auth: Auth, found: Mistakes) -> None:
    """Refuse two keys for the engines, and what stands for a key in what `pdproxy config print`
    shows.
    """
    if MASK in (*auth.api_keys, *auth.admin_keys, auth.engine_api_key):
        name = (
            "api_keys"
            if MASK in auth.api_keys
            else "admin_keys"
            if MASK in auth.admin_keys
            else "engine_api_key"
        )
        where = found.source(("auth", name))
        text = (
            f"auth.{name}: {MASK} is what `pdproxy config print` shows in place of a key, not a "
            f"key{where}"
        )
        found.add(("auth",), text)
    if auth.engine_api_key is not None and auth.engine_api_key_file is not None:
        names = "engine_api_key", "engine_api_key_file"
        where = "".join(dict.fromkeys(found.source(("auth", name)) for name in names))
        text = f"auth: engine_api_key and engine_api_key_file exclude each other: give one{where}"
        found.add(("auth",), text)


def read_secret(setting: str, path: str) -> str:
    """Return the secret that a file holds.

    Raises:
        SettingsError: it can't be read, or holds something else.
    """
    secret = read_key(setting, path)
    if len(secret) < MIN_SECRET:
        raise SettingsError(
            f"{setting}: {spell_file(Path(path))}: holds less than {MIN_SECRET} characters"
        )
    return secret


def check_tenants(tenants: TenantSettings, found: Mistakes) -> None:
    """Refuse two secrets."""
    if tenants.secret is not None and tenants.secret_file is not None:
        names = "secret", "secret_file"
        where = "".join(dict.fromkeys(found.source(("tenants", name)) for name in names))
        found.add(
            ("tenants",), f"tenants: secret and secret_file exclude each other: give one{where}"
        )


class KeyRights(msgspec.Struct, frozen=True):
    """What requests with one key may ask for. None: anything.

    `models`: names that engines know, or patterns with one `*`; `pools`, `routes`, `tenants`:
    names. `max_tokens`: of one answer; `n`: answers to one request, to all of its prompts together.
    `until`: when the key ends, in Unix seconds.
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
    """Return a whole number of 1 or more. Raises ValueError with what is wrong, which follows "line
    5", as the others do.
    """
    if not _WHOLE.fullmatch(value) or int(value) < 1:
        raise ValueError(f"has a wrong {name}: expected a whole number, 1 or more")
    return int(value)


def _names(name: str, value: str) -> tuple[str, ...]:
    found = tuple(value.split(","))
    if not all(found) or len(found) > MOST_NAMES:
        raise ValueError(
            f"has a wrong {name}: expected up to {MOST_NAMES} names with commas between them"
        )
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
    raise ValueError(
        f"has a wrong {name}: expected a time with its zone, such as 2027-01-31T00:00:00Z"
    )


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


class KeyLimits(msgspec.Struct, frozen=True):
    """What the clients with keys of one name may do, together. None: no limit.

    `inflight`: requests at once, those that wait included; `rpm`, `tpm`: requests and tokens per
    minute; `weight`: their part of the places, compared with others' while all of them wait;
    `priority`: the least and the greatest that a request may have.
    """

    inflight: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    weight: float | None = None
    priority: tuple[int, int] | None = None


class KeyLine(msgspec.Struct, frozen=True):
    """One key of a file. `name`: None for a key alone. `read_only`: of an operator's key."""

    number: int
    name: str | None
    key: str
    limits: KeyLimits = KeyLimits()
    rights: KeyRights = ALL_RIGHTS
    read_only: bool = False


def read_key_lines(setting: str, path: str, *, of_operators: bool = False) -> list[KeyLine]:
    """Return the keys of a file; blank lines and those that begin with `#` are skipped.

    Raises:
        SettingsError: it can't be read, or a line is wrong.
    """
    where, found = f"{setting}: {spell_file(Path(path))}", []
    names: dict[str, KeyLine] = {}
    keys: dict[str, KeyLine] = {}
    for number, line in enumerate(read_lines(setting, path), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            one = _line(number, text, of_operators=of_operators)
            _compare(one, names, keys)
        except ValueError as error:
            raise SettingsError(f"{where}: line {number} {error}") from None
        found.append(one)
    return found


def _compare(one: KeyLine, names: dict[str, KeyLine], keys: dict[str, KeyLine]) -> None:
    same_key = keys.setdefault(one.key, one)
    if same_key.name != one.name:
        raise ValueError(f"holds the same key as line {same_key.number}, under another name")
    if (same_key.rights, same_key.read_only) != (one.rights, one.read_only):
        raise ValueError(
            f"holds the same key as line {same_key.number}, with other words behind it"
        )
    if one.name is None:
        return
    same_name = names.setdefault(one.name, one)
    if same_name.limits != one.limits:
        raise ValueError(
            f"has other limits than line {same_name.number}, and the same name: they share the "
            f"limits"
        )


def _line(number: int, text: str, *, of_operators: bool) -> KeyLine:
    """Return a line's key. Raises ValueError with what is wrong, which follows "line 5"."""
    first, *words = text.split()
    name, colon, key = first.partition(":")
    if not colon:
        if words:
            has_words = any("=" in word or word == READ_ONLY for word in words)
            raise ValueError(
                "has words behind its key, and no name: expected name:key" if has_words else _NO_KEY
            )
        return KeyLine(number, None, _key(first))
    if not _NAME.fullmatch(name):
        raise ValueError(
            "has a wrong name before its colon: expected up to 64 letters, digits, dots, dashes "
            "and underscores"
        )
    key = _key(key)
    if of_operators:
        if any(word != READ_ONLY for word in words):
            raise ValueError(
                f"has an unknown word behind its key: a key for the admin API has none but "
                f"{READ_ONLY}"
            )
        return KeyLine(number, name, key, read_only=bool(words))
    found = _words(words)
    rights = {word: value for word, value in found.items() if word in RIGHTS}
    limits = {word: value for word, value in found.items() if word not in RIGHTS}
    return KeyLine(number, name, key, KeyLimits(**limits), KeyRights(**rights))


def _key(text: str) -> str:
    try:
        return msgspec.convert(text, Key)
    except msgspec.ValidationError:
        raise ValueError(_NO_KEY) from None


def _words(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _READ:
            raise ValueError(
                f"has an unknown word behind its key: expected {_WORDS}, each with = and its value"
            )
        if name in found:
            raise ValueError(f"gives {name} twice")
        found[name] = _READ[name](name, value)
    return found


def _weight(name: str, value: str) -> float:
    number = float(value) if _DECIMAL.fullmatch(value) else math.nan
    if not 0.001 <= number <= MOST_WEIGHT:
        raise ValueError(f"has a wrong {name}: expected a number from 0.001 to {MOST_WEIGHT:g}")
    return number


def _priority(name: str, value: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(value)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"has a wrong {name}: expected the least and the greatest, such as 0..10")
    return int(found[1]), int(found[2])


_READ: dict[str, Callable[[str, str], Any]] = {
    "inflight": whole,
    "rpm": whole,
    "tpm": whole,
    "weight": _weight,
    "priority": _priority,
    **RIGHTS,
}
_WORDS = f"{', '.join([*_READ][:-1])} and {[*_READ][-1]}"
