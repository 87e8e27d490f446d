"""Where settings come from: flags override the environment, which overrides YAML, which overrides
defaults.

Owns that order, and how flags and variables are read. Each source is checked against the schema by
itself, so that an error names the source that is wrong, even if another source overrides its value.
All mistakes of all sources are reported at once.

Variables: `PDPROXY_DEADLINES__FIRST_TOKEN=5` is `deadlines.first_token: 5`. Lists are comma
separated, or JSON. Nodes can't be given in this way, only by flags and YAML. An unknown variable
with the prefix is an error, so that a misspelt one is noticed, but for those that are listed here
as no settings.

Flags for where decode engines receive KV are for those of the first pool: one that is given once is
for each of them; given several times, or as a list of hosts, it is for each in turn. `0.0.0.0` is
an address to bind, not one to send to: it means the host of the engine's URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdproxy.settings.conform import collect, conform, json_list, leaves, parse
from pdproxy.settings.crosscheck import check_urls, crosscheck
from pdproxy.settings.engines import EngineFlag, with_scheme
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, did_you_mean, quote
from pdproxy.settings.files import read_yaml, spell_file
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Host, Port, fields_of
from pdproxy.settings.stages import add_stages

ANY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 - nothing is bound to it here


class ReceiverFlag(NamedTuple):
    """A flag: its name for errors, the field of `Receiver` that it sets, and a text for each time
    it was given.
    """

    option: str
    field: str
    texts: Sequence[str]


def put_receivers(pool: Mapping[str, Any], flags: Sequence[ReceiverFlag]) -> None:
    """Set the receivers of a pool's decode engines from flags.

    Raises:
        SettingsError: naming the flag.
    """
    decodes = [node for node in pool.get("nodes", ()) if node.get("role") == "decode"]
    for flag in flags:
        values = _values(flag)
        if not decodes:
            raise SettingsError(f"{flag.option}: no decode engine is configured")
        if len(values) not in (1, len(decodes)):
            raise SettingsError(
                f"{flag.option}: given for {len(values)} decode engines, but there are "
                f"{len(decodes)}: give one for all, "
                "or one for each"
            )
        for index, node in enumerate(decodes):
            value = values[index % len(values)]
            if value is not None:
                node["receiver"] = {**(node.get("receiver") or {}), flag.field: value}


def _values(flag: ReceiverFlag) -> list[object]:
    where = f" ({flag.option})"
    if flag.field == "host":
        hosts = [host for text in flag.texts for host in _hosts(text.strip())]
        path: KeyPath = ("receiver", flag.field)
        return [None if host in ANY_ADDRESS else conform(host, Host, where, path) for host in hosts]
    kind = tuple[Port, ...]
    return [
        conform(parse(text, kind), kind, where, ("receiver", flag.field)) for text in flag.texts
    ]


def _hosts(text: str) -> list[Any]:
    """Return the hosts of a flag: `a,b` or JSON. `[::]` is an address, not JSON."""
    given = json_list(text)
    return [host.strip() for host in text.split(",")] if given is None else given


PREFIX = "PDPROXY_"
CONFIG = "PDPROXY_CONFIG"
"""Names the YAML file if there is no `--config`."""
RESERVED = re.compile(r"PDPROXY_(CONFIG|REQUIRE_ENGINES|TORCH_INDEX|ENGINES_\w*|TEST_\w*)")
"""Not settings: the file's name, and what tests and tools of the source tree read."""
# Kubernetes puts each service's address into the environment of all pods in its namespace. For a
# service named `pdproxy`, or `pdproxy-something`, these variables have our prefix. They are not
# mistakes of the operator.
_SERVICE_LINK = re.compile(
    r"PDPROXY_([A-Z0-9_]+_)??"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|(?"
    r"P<port>PORT))"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


class Setting(NamedTuple):
    """One leaf of the tree with its value, already checked against the schema."""

    path: tuple[str, ...]
    value: object


def read_environment(env: Mapping[str, str], found: Mistakes) -> Iterator[Setting]:
    """Yield the settings that variables set, in the order of their names.

    Mistakes are added to `found`: a variable with our prefix is unknown, is empty, or holds what
    its setting can't be.
    """
    known = {variable(path): (path, kind) for path, kind in leaves(Settings)}
    for name in sorted(key for key in env if key.startswith(PREFIX)):
        if RESERVED.fullmatch(name) or _is_service_link(name, env[name]):
            continue
        if name not in known:
            found.add(
                ("environment",),
                f"{_spell(name)}: unknown environment variable{_hint(name, known)}",
            )
            continue
        path, kind = known[name]
        with found.collecting(*path):
            refuse_empty(name, env[name])
            yield Setting(
                path, collect(parse(env[name], kind), kind, f" (environment {name})", path, found)
            )


def variable(path: tuple[str, ...]) -> str:
    """Return the name of a setting's variable."""
    return PREFIX + "__".join(path).upper()


def refuse_empty(name: str, value: str) -> None:
    """Refuse a variable without a value: otherwise `API_KEYS=$UNSET` would open a proxy that should
    check keys.
    """
    if not value.strip():
        raise SettingsError(f"{name}: is empty: unset the environment variable or give it a value")


def _is_service_link(name: str, value: str) -> bool:
    match = _SERVICE_LINK.fullmatch(name)
    return match is not None and (match["port"] is None or _LINK_VALUE.fullmatch(value) is not None)


def _hint(name: str, known: Mapping[str, object]) -> str:
    if name.upper().startswith(f"{PREFIX}POOLS"):
        return (
            ": engines are given by flags (--prefill, --decode, --aggregated) or in the YAML file"
        )
    return did_you_mean(name.upper(), known)


def _spell(name: str) -> str:
    return name if name.isascii() and name.isprintable() else quote(name)


__all__ = ["POOL", "EngineFlag", "Flag", "load", "with_scheme"]


class Flag(NamedTuple):
    """A setting from the command line: the option's name for errors, the dotted key, the text as it
    was typed.
    """

    option: str
    key: str
    text: str


POOL = "pool."
"""The beginning of a `Flag`'s key, if it sets something of the first pool."""


def load(
    config: Path | None,
    env: Mapping[str, str],
    flags: Iterable[Flag] = (),
    engines: Iterable[EngineFlag] = (),
    *,
    receivers: Sequence[ReceiverFlag] = (),
    stage_config: Path | None = None,
    need_engines: bool = True,
) -> Settings:
    """Return the settings in force. The process's own environment and arguments are not read.

    - `config`: the YAML file. None: the one that PDPROXY_CONFIG names, if any.
    - `stage_config`: a file of vllm-omni's, whose stages are added to the first pool
      (`pdproxy.settings.stages`).
    - `engines` are added after these.
    - `receivers` are then set on the decode engines.
    - `need_engines` False: a pool without engines is allowed.

    Raises:
        SettingsError: a line for each mistake, which names the key, the variable, the flag or the
            engine.
    """
    found = Mistakes()
    tree = _read_file(config, env, found)
    for path, value in read_environment(env, found):
        _put(tree, path, value)
    _put_flags(tree, flags, found)
    pool = _first_pool(tree)
    if stage_config is not None:
        engines = add_stages(pool, stage_config, engines, found)
    for role, url in engines:
        nodes = pool.setdefault("nodes", [])
        found.read_from(("pools", 0, "nodes", len(nodes)), f" (--{role.replace('_', '-')})")
        nodes.append({"url": with_scheme(url), "role": role})
    if receivers and not found.within("pools", 0, "nodes"):
        with found.collecting("pools"):
            put_receivers(pool, receivers)
    return _settings(tree, found, need_engines=need_engines)


def settings_of(content: Mapping[str, Any]) -> Settings:
    """Return the settings that a file with this content has.

    Raises:
        SettingsError: a line for each mistake, which names the key.
    """
    found = Mistakes()
    tree = collect(content, Settings, "", (), found)
    _first_pool(tree)
    return _settings(tree, found, need_engines=True)


def _settings(tree: dict[str, Any], found: Mistakes, *, need_engines: bool) -> Settings:
    """Return settings whose values each are as they can be, and check what these must have
    together. Raises SettingsError for what is in `found`, too.
    """
    # A section with a mistake has its defaults here. It is not compared with others: that would
    # report mistakes that are none.
    settings = msgspec.convert(
        {name: value for name, value in tree.items() if not found.within(name)}, Settings
    )
    if found.within("pools"):
        check_urls(_first_pool(tree).get("nodes", ()), found)
    settings = crosscheck(settings, found, need_engines=need_engines)
    found.raise_any()
    return settings


def _read_file(config: Path | None, env: Mapping[str, str], found: Mistakes) -> dict[str, Any]:
    try:
        if config is None and CONFIG in env:
            refuse_empty(CONFIG, env[CONFIG])
            config = Path(env[CONFIG])
        value = None if config is None else read_yaml(config, found)
    except SettingsError as error:
        found.add((), *error.mistakes)
        return {}
    where = f" (file {spell_file(config)})" if config is not None else ""
    tree: dict[str, Any] = collect(
        {} if value is None else _in_one_list(value), Settings, where, (), found
    )
    return tree


def _in_one_list(value: object) -> object:
    """Return the content of a file with each pool's nodes in one list: `pdproxy config print` once
    had those of DNS apart.
    """
    pools = value.get("pools") if isinstance(value, dict) else None
    for pool in pools if isinstance(pools, list) else ():
        if isinstance(pool, dict) and isinstance(pool.get("dns_nodes"), list):
            nodes = pool.get("nodes") or []
            pool["nodes"] = [*nodes, *pool.pop("dns_nodes")] if isinstance(nodes, list) else nodes
    return value


def _put_flags(tree: dict[str, Any], flags: Iterable[Flag], found: Mistakes) -> None:
    for option, key, text in flags:
        of_pool = key.startswith(POOL)
        names = tuple(key.removeprefix(POOL).split("."))
        kind: Any = Pool if of_pool else Settings
        for name in names:
            kind = next(field.type for field in fields_of(kind) if field.name == name)
        path: KeyPath = ("pools", 0, *names) if of_pool else names
        value = collect(parse(text, kind), kind, f" ({option})", path, found)
        _put(_first_pool(tree) if of_pool else tree, names, value)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _first_pool(tree: dict[str, Any]) -> dict[str, Any]:
    pools = tree.setdefault("pools", [])
    if not pools:
        pools.append({})
    pool: dict[str, Any] = pools[0]
    return pool
