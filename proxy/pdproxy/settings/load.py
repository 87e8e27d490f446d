"""Where settings come from: flags override the environment, which overrides YAML, which overrides defaults.

Owns that order. Each source is checked against the schema by itself, so that an error names the source that is wrong, even
if another source overrides its value. All mistakes of all sources are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdproxy.settings.conform import collect, leaves, parse
from pdproxy.settings.crosscheck import check_urls, crosscheck
from pdproxy.settings.engines import EngineFlag, with_scheme
from pdproxy.settings.environment import CONFIG, read_environment, refuse_empty
from pdproxy.settings.errors import Mistakes, SettingsError, spell_key
from pdproxy.settings.receivers import ReceiverFlag, put_receivers
from pdproxy.settings.schema import VLLM_BOOTSTRAP_PORT, Pool, Settings
from pdproxy.settings.section import fields_of
from pdproxy.settings.stage_nodes import read_stages
from pdproxy.settings.yaml_file import read_yaml, spell_file
from pdproxy.transfer.registry import AUTO

__all__ = ["POOL", "EngineFlag", "Flag", "load", "with_scheme"]


class Flag(NamedTuple):
    """A setting from the command line: the option's name for errors, the dotted key, the text as it was typed."""

    option: str
    key: str
    text: str


POOL = "pool."
"""The beginning of a `Flag`'s key, if it sets a field of the first pool."""


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
    - `stage_config`: a file of vllm-omni's, whose stages are added to the first pool (`pdproxy.settings.stage_nodes`).
    - `engines` are added after these.
    - `receivers` are then set on the decode engines.
    - `need_engines` False: a pool without engines is allowed.

    Raises:
        SettingsError: a line for each mistake, which names the key, the variable, the flag or the engine.
    """
    found = Mistakes()
    tree = _read_file(config, env, found)
    for path, value in read_environment(env, found):
        _put(tree, path, value)
    _put_flags(tree, flags, found)
    pool = _first_pool(tree)
    if stage_config is not None:
        engines = _add_stages(pool, stage_config, engines, found)
    for role, url in engines:
        nodes = pool.setdefault("nodes", [])
        found.read_from(("pools", 0, "nodes", len(nodes)), f" (--{role})")
        nodes.append({"url": with_scheme(url), "role": role})
    if receivers and not found.within("pools", 0, "nodes"):
        with found.collecting("pools"):
            put_receivers(pool, receivers)
    # A section with a mistake has its defaults here. It is not compared with others: that would report mistakes that are none.
    settings = msgspec.convert({name: value for name, value in tree.items() if not found.within(name)}, Settings)
    if found.within("pools"):
        check_urls(pool.get("nodes", ()), found)
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
    tree: dict[str, Any] = collect({} if value is None else value, Settings, where, (), found)
    return tree


def _put_flags(tree: dict[str, Any], flags: Iterable[Flag], found: Mistakes) -> None:
    kinds = {spell_key(path): (path, kind) for path, kind in leaves(Settings)}
    for option, key, text in flags:
        where = f" ({option})"
        if key.startswith(POOL):
            name = key.removeprefix(POOL)
            kind = next(field.type for field in fields_of(Pool) if field.name == name)
            _first_pool(tree)[name] = collect(text, kind, where, ("pools", 0, name), found)
        else:
            path, kind = kinds[key]
            _put(tree, path, collect(parse(text, kind), kind, where, path, found))


def _add_stages(
    pool: dict[str, Any], stage_config: Path, engines: Iterable[EngineFlag], found: Mistakes
) -> Iterable[EngineFlag]:
    """Add the stages' engines to a pool, and set its contract. Return the engines that belong to no stage."""
    port, connector = (
        None if found.within("pools", 0, name) else pool.get(name) for name in ("bootstrap_port", "connector")
    )
    if connector == AUTO:  # the file names it
        connector = None
    try:
        stages = read_stages(stage_config, engines, connector, port or VLLM_BOOTSTRAP_PORT)
    except SettingsError as error:
        found.add(("pools",), *error.mistakes)
        return ()
    if stages.connector is not None:
        pool["connector"] = stages.connector
    pool.setdefault("nodes", []).extend(stages.nodes)
    return stages.engines


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
