"""Makes engines of a pool from vllm-omni's stages: each flagged stage is an engine with that role, at one URL.

vllm-omni starts its stages itself and reaches them by queues, so its files have no URLs. A stage gets one from `runtime.url`,
from `engine_args.host` and `port`, or else from --prefill and --decode in the order of the file. Owns that rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pdproxy.settings.crosscheck import engine_url
from pdproxy.settings.engines import EngineFlag, with_scheme
from pdproxy.settings.errors import Mistakes, SettingsError, spell_key
from pdproxy.settings.external_file import ForeignFile
from pdproxy.settings.schema import VLLM_BOOTSTRAP_PORT, Role
from pdproxy.settings.stage_checks import Pair, bootstrap, check, pairs
from pdproxy.settings.stages import Reader, Stage
from pdproxy.settings.yaml_file import read_yaml, spell_file
from pdproxy.transfer.peers import PeerSource
from pdproxy.transfer.registry import entry_of


class StageNodes(NamedTuple):
    """What a stage configuration adds to a pool: its contract (None without pairs), nodes in the schema's form, and the
    engines of the command line that belong to no stage."""

    connector: str | None
    nodes: list[dict[str, Any]]
    engines: list[EngineFlag]


def read_stages(
    config: Path, engines: Iterable[EngineFlag], connector: str | None = None, port: int = VLLM_BOOTSTRAP_PORT
) -> StageNodes:
    """Read a stage configuration and make engines from it.

    `engines` are those of the command line, `connector` is the operator's choice, `port` the Mooncake bootstrap port of prefill
    stages for which the file names none.

    Raises:
        SettingsError: one line that names the key and the file.
    """
    name = f" (stage config {spell_file(config)})"
    file = ForeignFile(name)
    found_twice = Mistakes()
    tree = read_yaml(config, found_twice)
    found_twice.raise_any()
    stages = Reader(file).stages(tree)
    found = pairs(stages, file)
    contract = check(found, file, connector)
    urls, rest = _urls(stages, list(engines), file)
    bootstraps = contract is not None and entry_of(contract).capabilities.peers_from is PeerSource.BOOTSTRAP
    return StageNodes(contract, _nodes(stages, found, urls, port if bootstraps else None, file), rest)


def _urls(
    stages: tuple[Stage, ...], engines: list[EngineFlag], file: ForeignFile
) -> tuple[dict[int, str], list[EngineFlag]]:
    """Return each stage's URL by its index, and the engines that belong to no stage."""
    if not stages:
        return {}, engines
    urls = {stage.index: _own_url(stage, file) for stage in stages if stage.url is not None}
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        without = [stage for stage in stages if stage.role == role and stage.url is None]
        given = [engine.url for engine in engines if engine.role == role]
        if len(without) != len(given):
            missing = ", ".join(spell_key(stage.path) for stage in without) or "none"
            raise SettingsError(
                f"--{role}: {len(given)} given, expected {len(without)}: one for each {role} stage without a URL of its own "
                f"({missing}){file.where}"
            )
        for stage, url in zip(without, given, strict=True):
            urls[stage.index] = engine_url(with_scheme(url), (*stage.path, "runtime", "url"))
    return urls, [engine for engine in engines if engine.role not in roles]


def _own_url(stage: Stage, file: ForeignFile) -> str:
    try:
        return engine_url(with_scheme(stage.url or ""), (*stage.path, "runtime", "url"))
    except SettingsError as error:
        raise SettingsError(f"{error}{file.where}") from None


def _nodes(
    stages: tuple[Stage, ...], found: tuple[Pair, ...], urls: dict[int, str], port: int | None, file: ForeignFile
) -> list[dict[str, Any]]:
    """`port`: of bootstrap servers, None if the contract has none."""
    nodes, bound = [], dict[str, Stage]()
    prefills = sum(stage.role == "prefill" for stage in stages)
    for stage in stages:
        url = urls[stage.index]
        facts: dict[str, object] = {"tensor_parallel_size": stage.tensor_parallel_size}
        if stage.kv.engine_id is not None:
            facts["engine_id"] = stage.kv.engine_id
        node: dict[str, Any] = {"url": url, "role": stage.role, "facts": facts}
        if stage.role == "prefill" and port is not None:
            address = bootstrap(stage, urlsplit(url).hostname or "", port)
            _bind(bound, address, stage, file)
            facts["bootstrap"] = address
        elif stage.role == "decode":
            sources = [urls[pair.prefill.index] for pair in found if pair.decode is stage]
            if len(sources) < prefills:
                node["sources"] = sources
        nodes.append(node)
    return nodes


def _bind(bound: dict[str, Stage], address: str, stage: Stage, file: ForeignFile) -> None:
    if (other := bound.setdefault(address, stage)) is not stage:
        text = f"its Mooncake bootstrap server would be at {address}, like that of {spell_key(other.path)}: give each its own"
        raise file.wrong(stage.path, f"{text} mooncake_bootstrap_port")
