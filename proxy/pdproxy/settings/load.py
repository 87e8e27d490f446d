"""Where settings come from: flags override the environment, which overrides YAML, which overrides defaults.

Owns that order. Each source is checked against the schema by itself, so that an error names the source that is wrong, even
if another source overrides its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdproxy.settings.conform import conform, leaves, parse
from pdproxy.settings.crosscheck import crosscheck
from pdproxy.settings.engines import EngineFlag, with_scheme
from pdproxy.settings.environment import CONFIG, read_environment, refuse_empty
from pdproxy.settings.errors import KeyPath, spell_key
from pdproxy.settings.receivers import ReceiverFlag, put_receivers
from pdproxy.settings.schema import VLLM_BOOTSTRAP_PORT, Pool, Settings
from pdproxy.settings.stage_nodes import read_stages
from pdproxy.settings.yaml_file import read_yaml, spell_file

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
        SettingsError: one line that names the key, the variable, the flag or the engine.
    """
    if config is None and CONFIG in env:
        refuse_empty(CONFIG, env[CONFIG])
        config = Path(env[CONFIG])
    tree = _read_file(config) if config is not None else {}
    for path, value in read_environment(env):
        _put(tree, path, value)
    kinds = {spell_key(path): (path, kind) for path, kind in leaves(Settings)}
    for option, key, text in flags:
        where = f" ({option})"
        if key.startswith(POOL):
            name = key.removeprefix(POOL)
            pool_path: KeyPath = ("pools", 0, name)
            kind = next(field.type for field in msgspec.structs.fields(Pool) if field.name == name)
            _first_pool(tree)[name] = conform(text, kind, where, pool_path)
        else:
            path, kind = kinds[key]
            _put(tree, path, conform(parse(text, kind), kind, where, path))
    if stage_config is not None:
        engines = _add_stages(_first_pool(tree), stage_config, engines)
    for role, url in engines:
        _first_pool(tree).setdefault("nodes", []).append({"url": with_scheme(url), "role": role})
    if receivers:
        put_receivers(_first_pool(tree), receivers)
    return crosscheck(msgspec.convert(tree, Settings), need_engines=need_engines)


def _read_file(config: Path) -> dict[str, Any]:
    value = read_yaml(config)
    tree: dict[str, Any] = conform({} if value is None else value, Settings, f" (file {spell_file(config)})")
    return tree


def _add_stages(pool: dict[str, Any], stage_config: Path, engines: Iterable[EngineFlag]) -> Iterable[EngineFlag]:
    """Add the stages' engines to a pool, and set its contract. Return the engines that belong to no stage."""
    port = pool.get("bootstrap_port", VLLM_BOOTSTRAP_PORT)
    found = read_stages(stage_config, engines, pool.get("connector"), port)
    if found.connector is not None:
        pool["connector"] = found.connector
    pool.setdefault("nodes", []).extend(found.nodes)
    return found.engines


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
