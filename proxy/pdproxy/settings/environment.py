"""Reads settings from `PDPROXY_*` variables: `PDPROXY_DEADLINES__FIRST_TOKEN=5` is `deadlines.first_token: 5`.

Lists are comma separated, or JSON. Nodes can't be given in this way, only by flags and YAML. Owns the list of variables with this
prefix that are no settings. All other unknown variables with the prefix are errors, so that a misspelt one is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdproxy.settings.conform import collect, leaves, parse
from pdproxy.settings.errors import Mistakes, SettingsError, did_you_mean, quote
from pdproxy.settings.schema import Settings

PREFIX = "PDPROXY_"
CONFIG = "PDPROXY_CONFIG"
"""Names the YAML file if there is no `--config`."""

RESERVED = re.compile(r"PDPROXY_(CONFIG|REQUIRE_ENGINES|TORCH_INDEX|ENGINES_\w*|TEST_\w*)")
"""Not settings: the file's name, and what tests and tools of the source tree read."""

# Kubernetes puts each service's address into the environment of all pods in its namespace. For a service named `pdproxy`, or
# `pdproxy-something`, these variables have our prefix. They are not mistakes of the operator.
_SERVICE_LINK = re.compile(
    r"PDPROXY_([A-Z0-9_]+_)??"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|(?P<port>PORT))"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


class Setting(NamedTuple):
    """One leaf of the tree with its value, already checked against the schema."""

    path: tuple[str, ...]
    value: object


def read_environment(env: Mapping[str, str], found: Mistakes) -> Iterator[Setting]:
    """Yield the settings that variables set, in the order of their names.

    Mistakes are added to `found`: a variable with our prefix is unknown, is empty, or holds what its setting can't be.
    """
    known = {variable(path): (path, kind) for path, kind in leaves(Settings)}
    for name in sorted(key for key in env if key.startswith(PREFIX)):
        if RESERVED.fullmatch(name) or _is_service_link(name, env[name]):
            continue
        if name not in known:
            found.add(("environment",), f"{_spell(name)}: unknown environment variable{_hint(name, known)}")
            continue
        path, kind = known[name]
        with found.collecting(*path):
            refuse_empty(name, env[name])
            yield Setting(path, collect(parse(env[name], kind), kind, f" (environment {name})", path, found))


def variable(path: tuple[str, ...]) -> str:
    """Return the name of a setting's variable."""
    return PREFIX + "__".join(path).upper()


def refuse_empty(name: str, value: str) -> None:
    """Refuse a variable without a value: otherwise `API_KEYS=$UNSET` would open a proxy that should check keys."""
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
