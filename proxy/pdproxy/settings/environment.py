"""Reads settings from `PDPROXY_*` variables: `PDPROXY_DEADLINES__FIRST_TOKEN=5` is `deadlines.first_token: 5`.

Lists are comma separated. Nodes can't be given this way: flags and YAML do. Owns which variables with our prefix are no
settings: everything else that starts with it and isn't known is an error, so that a misspelt variable is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdproxy.settings.conform import conform, leaves, parse
from pdproxy.settings.errors import SettingsError, did_you_mean, quote
from pdproxy.settings.schema import Settings

PREFIX = "PDPROXY_"
CONFIG = "PDPROXY_CONFIG"
"""Names the YAML file where no `--config` does."""

RESERVED = re.compile(r"PDPROXY_(CONFIG|REQUIRE_ENGINES|TORCH_INDEX|ENGINES_\w*|TEST_\w*)")
"""No settings: the file's name, and what tests and tools of the source tree read."""

# Kubernetes puts a service's address into the environment of every pod beside it. For a service named `pdproxy`, or
# `pdproxy-something`, those variables carry our prefix, and a proxy that refused to start over them would be a riddle.
_SERVICE_LINK = re.compile(
    r"PDPROXY_([A-Z0-9_]+_)??"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|(?P<port>PORT))"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


class Setting(NamedTuple):
    """One leaf of the tree with its value, already held against the schema."""

    path: tuple[str, ...]
    value: object


def read_environment(env: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings that variables give, in the order of their names.

    Raises:
        SettingsError: a variable with our prefix is unknown, empty or holds what its setting can't be.
    """
    known = {variable(path): (path, kind) for path, kind in leaves(Settings)}
    for name in sorted(key for key in env if key.startswith(PREFIX)):
        if RESERVED.fullmatch(name) or _is_service_link(name, env[name]):
            continue
        if name not in known:
            raise SettingsError(f"{_spell(name)}: unknown environment variable{_hint(name, known)}")
        path, kind = known[name]
        refuse_empty(name, env[name])
        yield Setting(path, conform(parse(env[name], kind), kind, f" (environment {name})", path))


def variable(path: tuple[str, ...]) -> str:
    """Return the variable of a setting."""
    return PREFIX + "__".join(path).upper()


def refuse_empty(name: str, value: str) -> None:
    """Refuse a variable without a value: `API_KEYS=$UNSET` would otherwise open a proxy that should ask for keys."""
    if not value.strip():
        raise SettingsError(f"{name}: is empty: unset the environment variable or give it a value")


def _is_service_link(name: str, value: str) -> bool:
    match = _SERVICE_LINK.fullmatch(name)
    return match is not None and (match["port"] is None or _LINK_VALUE.fullmatch(value) is not None)


def _hint(name: str, known: Mapping[str, object]) -> str:
    if name.upper().startswith(f"{PREFIX}POOLS"):
        return ": engines are given by flags (--prefill, --decode, --aggregated) or in the YAML file"
    return did_you_mean(name.upper(), known)


def _spell(name: str) -> str:
    return name if name.isascii() and name.isprintable() else quote(name)
