"""Reads vllm-omni's stage configuration: which of its stages prefill, which decode, and how their
engines transfer KV.

Source: vllm-omni's stage YAML and its `pd_utils` (PR 1303), which allows one pair; vLLM 0.32.0's
connectors for what each allows. A file has dozens of keys that only its engines need. Only the keys
that decide a pair are read and checked. Values are plain, or anything that describes itself by
names (`pdproxy.settings.external_file`). Here a file may have any number of pairs, if one contract
can run all of them. Mistakes that engines would find at the first request, or never, are reported
at the start.

vllm-omni starts its stages itself and reaches them by queues, so its files have no URLs. Each
flagged stage is an engine with that role, at one URL: that of `runtime.url`, of `engine_args.host`
and `port`, or else of --prefill and --decode in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.addresses import is_any
from pdproxy.settings.engines import EngineFlag, Role, engine_url, with_scheme
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, spell_key
from pdproxy.settings.external_file import ForeignFile, spell
from pdproxy.settings.files import read_yaml, spell_file
from pdproxy.settings.pools import VLLM_BOOTSTRAP_PORT
from pdproxy.transfer import registry
from pdproxy.transfer.peers import PeerSource
from pdproxy.transfer.registry import entry_of

STAGES = "stage_args"
"""The key of the list of stages."""
BOOTSTRAP_ENV = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
"""The variable that sets vLLM's Mooncake bootstrap port; a stage sets it under `runtime.env`."""
StageId = int | str
_ROLES: dict[Role, tuple[str, ...]] = {
    "prefill": ("kv_producer", "kv_both"),
    "decode": ("kv_consumer", "kv_both"),
}

_KV = ("engine_args", "kv_transfer_config")


class KvConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a stage's `kv_transfer_config` that a pair depends on. None: the file does not
    set it.
    """

    role: str
    connector: str
    engine_id: str | None = None
    ip: str | None = None
    buffer_device: str | None = None
    buffer_size: float | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that only prefills or only decodes. `index` is its index in the file, `id` its
    `stage_id`.

    `sources` are the stages whose output it takes, by id or by index. `bootstrap_port` is the port
    of its Mooncake bootstrap server, `url` the URL of its engine's HTTP server; None if the file
    does not name them.
    """

    index: int
    id: StageId
    role: Role
    kv: KvConfig
    sources: tuple[StageId, ...] = ()
    tensor_parallel_size: int = 1
    bootstrap_port: int | None = None
    url: str | None = None

    @property
    def path(self) -> KeyPath:
        """The key of the stage in the file."""
        return (STAGES, self.index)


class Reader:
    """Reads the stages of one file."""

    def __init__(self, file: ForeignFile) -> None:
        self._file = file

    def stages(self, tree: object) -> tuple[Stage, ...]:
        """Return the stages that are flagged as prefill or decode, in the file's order.

        Raises:
            SettingsError: a line for each stage that is wrong: its key, what was expected and what
                was found.
        """
        stages = self._file.mapping(tree, ()).get(STAGES)
        if isinstance(stages, str | bytes) or not isinstance(stages, Sequence):
            raise self._file.wrong(
                (STAGES,), f"expected vllm-omni's list of stages, got {spell((STAGES,), stages)}"
            )
        known: dict[StageId, int] = {}
        found, mistakes = list[Stage](), Mistakes()
        for index, item in enumerate(stages):
            path: KeyPath = (STAGES, index)
            with mistakes.collecting(*path):
                stage = self._file.mapping(item, path)
                ident = self._id(stage.get("stage_id", index), (*path, "stage_id"))
                if ident in known:
                    raise self._file.wrong(
                        (*path, "stage_id"),
                        f"{ident} is the id of {spell_key((STAGES, known[ident]))}, too",
                    )
                known[ident] = index
                role = self._role(stage, path)
                if role is not None:
                    found.append(self._stage(stage, index, ident, role))
        mistakes.raise_any()
        return tuple(found)

    def _role(self, stage: Mapping[str, Any], path: KeyPath) -> Role | None:
        prefills, decodes = (
            self._file.bool(stage.get(name), (*path, name))
            for name in ("is_prefill_only", "is_decode_only")
        )
        if prefills and decodes:
            raise self._file.wrong(path, "is_prefill_only and is_decode_only exclude each other")
        return "prefill" if prefills else "decode" if decodes else None

    def _stage(self, stage: Mapping[str, Any], index: int, ident: StageId, role: Role) -> Stage:
        path: KeyPath = (STAGES, index)
        engine, runtime = (
            self._file.mapping(stage.get(name, {}), (*path, name), may_be_null=True)
            for name in ("engine_args", "runtime")
        )
        kv = self._kv(engine, (*path, "engine_args", "kv_transfer_config"), role)
        return Stage(
            index=index,
            id=ident,
            role=role,
            kv=kv,
            sources=self._sources(stage.get("engine_input_source"), (*path, "engine_input_source")),
            tensor_parallel_size=self._file.count(
                engine, "tensor_parallel_size", (*path, "engine_args")
            )
            or 1,
            bootstrap_port=self._bootstrap_port(runtime, kv, path),
            url=self._url(engine, runtime, path),
        )

    def _kv(self, engine: Mapping[str, Any], path: KeyPath, role: Role) -> KvConfig:
        given = engine.get("kv_transfer_config")
        if given is None:
            raise self._file.wrong(
                path, f"missing: a {role} stage needs one, with kv_connector and kv_role"
            )
        if isinstance(given, str):  # JSON, as for the engine's own flag
            given = self._file.json(given, path)
        config = self._file.mapping(given, path)
        if not config:
            raise self._file.wrong(
                path,
                f"an empty mapping ({type(given).__name__}): expected kv_connector and kv_role",
            )
        connector, allowed = self._file.text(config, "kv_connector", path), _ROLES[role]
        if not connector:
            raise self._file.wrong((*path, "kv_connector"), f"missing: a {role} stage needs one")
        kv_role = config.get("kv_role")
        if kv_role not in allowed:
            text = f"a {role} stage needs {' or '.join(allowed)}, got {spell((), kv_role)}"
            raise self._file.wrong((*path, "kv_role"), text)
        return KvConfig(
            role=kv_role,
            connector=connector,
            engine_id=self._file.text(config, "engine_id", path),
            ip=self._file.text(config, "kv_ip", path),
            buffer_device=self._file.text(config, "kv_buffer_device", path),
            buffer_size=self._file.number(config, "kv_buffer_size", path),
            extra=self._file.mapping(
                config.get("kv_connector_extra_config", {}),
                (*path, "kv_connector_extra_config"),
                may_be_null=True,
            ),
        )

    def _bootstrap_port(
        self, runtime: Mapping[str, Any], kv: KvConfig, path: KeyPath
    ) -> int | None:
        """Return the port. The engine reads its environment, vllm-omni's orchestrator the other
        key: they must agree.
        """
        env_path = (*path, "runtime", "env")
        env = self._file.mapping(runtime.get("env", {}), env_path, may_be_null=True)
        given = self._file.port(env, BOOTSTRAP_ENV, env_path)
        extra_path = (*path, "engine_args", "kv_transfer_config", "kv_connector_extra_config")
        extra = self._file.port(kv.extra, "mooncake_bootstrap_port", extra_path)
        if given is not None and extra is not None and given != extra:
            other = spell_key((*extra_path, "mooncake_bootstrap_port"))
            raise self._file.wrong((*env_path, BOOTSTRAP_ENV), f"{given}, but {other} is {extra}")
        return extra if given is None else given

    def _url(
        self, engine: Mapping[str, Any], runtime: Mapping[str, Any], path: KeyPath
    ) -> str | None:
        """`runtime.url` is pdproxy's own key; `host` and `port` are those of `vllm serve`."""
        url, port = (
            self._file.text(runtime, "url", (*path, "runtime")),
            self._file.port(engine, "port", (*path, "engine_args")),
        )
        host = self._file.text(engine, "host", (*path, "engine_args"))
        if url is not None:
            if port is not None or host is not None:
                raise self._file.wrong(
                    (*path, "runtime", "url"),
                    "excludes engine_args.host and engine_args.port: give one",
                )
            return url
        if port is None:
            if host is not None:
                raise self._file.wrong(
                    (*path, "engine_args", "host"), "has no effect without engine_args.port"
                )
            return None
        if host is not None and is_any(host):
            raise self._file.wrong(
                (*path, "engine_args", "host"),
                f"{host} is an address to listen on: give runtime.url",
            )
        name = "127.0.0.1" if host is None else host
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def _sources(self, value: object, path: KeyPath) -> tuple[StageId, ...]:
        if value is None:
            return ()
        if (
            isinstance(value, str | bytes)
            or not isinstance(value, Iterable)
            or isinstance(value, Mapping)
        ):
            raise self._file.wrong(path, f"expected a list of stages, got {spell(path, value)}")
        return tuple(self._id(item, (*path, index)) for index, item in enumerate(value))

    def _id(self, value: object, path: KeyPath) -> StageId:
        if isinstance(value, int | str) and not isinstance(value, bool) and value != "":
            return value
        raise self._file.wrong(path, f"expected a stage's number or name, got {spell(path, value)}")


class StagePair(NamedTuple):
    """A prefill stage and a decode stage that takes its KV."""

    prefill: Stage
    decode: Stage


def pairs(stages: tuple[Stage, ...], file: ForeignFile) -> tuple[StagePair, ...]:
    """Return the pairs that decode stages name in `engine_input_source`, by a stage's id or, if no
    stage has it, by its index.

    No stage flagged: no pairs. A source that is no prefill stage has another meaning in vllm-omni,
    and is ignored.

    Raises:
        SettingsError: a flagged stage is in no pair.
    """
    prefills = [stage for stage in stages if stage.role == "prefill"]
    places: dict[StageId, Stage] = {stage.index: stage for stage in prefills}
    named = places | {stage.id: stage for stage in prefills}
    found: list[StagePair] = []
    for decode in (stage for stage in stages if stage.role == "decode"):
        sources = dict.fromkeys(named[source].index for source in decode.sources if source in named)
        if not sources:
            known = ", ".join(str(stage.id) for stage in prefills) or "there is none"
            raise file.wrong(
                (*decode.path, "engine_input_source"), f"names no prefill stage ({known})"
            )
        found += [StagePair(places[index], decode) for index in sources]
    used = {pair.prefill.index for pair in found}
    for prefill in prefills:
        if prefill.index not in used:
            raise file.wrong(prefill.path, "no decode stage names it in engine_input_source")
    return tuple(found)


def check(
    found: tuple[StagePair, ...], file: ForeignFile, connector: str | None = None
) -> str | None:
    """Return the contract that can run all pairs, None without pairs. `connector` is the operator's
    choice, if any.

    Raises:
        SettingsError: naming the keys of two stages that do not match, or a contract that is not
            possible.
    """
    for pair in found:
        _same_connector(pair, file)
    contract = _contract([stage for pair in found for stage in pair], file, connector)
    for pair in found:
        _same_buffers(pair, file)
        _parallel_sizes(pair, file, contract)
    _one_each({stage.index: stage for pair in found for stage in pair}, file)
    return contract


def bootstrap(prefill: Stage, engine_host: str, port: int) -> str:
    """Return the address of a prefill stage's Mooncake bootstrap server.

    `engine_host`: the host of its engine's HTTP server, used if the file names no other. `port`:
    used if the file names none.
    """
    address = prefill.kv.extra.get("bootstrap_server_address")
    if isinstance(address, str) and address:
        return f"http://{address}"
    host = prefill.kv.ip or engine_host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{prefill.bootstrap_port or port}"


def _same_connector(pair: StagePair, file: ForeignFile) -> None:
    if pair.prefill.kv.connector != pair.decode.kv.connector:
        raise file.wrong(
            *_mismatch(pair, "kv_connector", pair.prefill.kv.connector, pair.decode.kv.connector)
        )


def _contract(stages: list[Stage], file: ForeignFile, connector: str | None) -> str | None:
    if not stages:
        return None
    first = stages[0]
    for stage in stages:
        if stage.kv.connector != first.kv.connector:
            text = (
                f"{stage.kv.connector}, but {spell_key((*first.path, *_KV, 'kv_connector'))} is "
                f"{first.kv.connector}"
            )
            raise file.wrong(
                (*stage.path, *_KV, "kv_connector"), f"{text}: a pool has one contract"
            )
    path, name = (*first.path, *_KV, "kv_connector"), first.kv.connector
    able = registry.serving(name)
    if not able and connector is None:
        raise file.wrong(
            path, f"it is not known which contract {name} runs: name one by --connector"
        )
    if able and connector is not None and connector not in able:
        raise file.wrong(
            path, f"{name} runs {' or '.join(able)}, but the pool's connector is {connector}"
        )
    return connector or able[0]


def _same_buffers(pair: StagePair, file: ForeignFile) -> None:
    for name in ("kv_buffer_device", "kv_buffer_size"):
        ours, theirs = (getattr(stage.kv, name.removeprefix("kv_")) for stage in pair)
        if ours is not None and theirs is not None and ours != theirs:
            raise file.wrong(*_mismatch(pair, name, ours, theirs))


def _parallel_sizes(pair: StagePair, file: ForeignFile, contract: str | None) -> None:
    sizes = [stage.tensor_parallel_size for stage in pair]
    smaller, larger = sorted(sizes)
    if smaller == larger or contract is None:
        return
    path = (*pair.decode.path, "engine_args", "tensor_parallel_size")
    prefill = f"stage {pair.prefill.id} prefills with {sizes[0]}"
    if registry.entry_of(contract).capabilities.mixed_parallel_sizes:
        if larger % smaller:
            raise file.wrong(
                path, f"{sizes[1]}, but {prefill}: one must be a multiple of the other"
            )
    elif not all(_first_rank_stores(stage.kv.extra) for stage in pair):
        raise file.wrong(path, f"{sizes[1]}, but {prefill}: {contract} needs the same")


def _first_rank_stores(extra: Mapping[str, Any]) -> bool:
    """Return whether LMCache is configured so that its first rank holds all KV, as for MLA: then
    sizes don't matter.
    """
    inner = extra.get("lmcache.extra_config")
    return (inner if isinstance(inner, Mapping) else {}).get("save_only_first_rank") is True


def _one_each(stages: Mapping[int, Stage], file: ForeignFile) -> None:
    """Check what two engines may not share: the `engine_id` that their KV is named by."""
    ids: dict[str, Stage] = {}
    for _, stage in sorted(stages.items()):
        if (engine_id := stage.kv.engine_id) is None:
            continue
        if engine_id in ids:
            other = spell_key((*ids[engine_id].path, *_KV, "engine_id"))
            text = f"{engine_id} is the value of {other}, too: each engine needs its own"
            raise file.wrong((*stage.path, *_KV, "engine_id"), text)
        ids[engine_id] = stage


def _mismatch(
    pair: StagePair, name: str, ours: object, theirs: object
) -> tuple[tuple[str | int, ...], str]:
    other = spell_key((*pair.prefill.path, *_KV, name))
    return (
        *pair.decode.path,
        *_KV,
        name,
    ), f"{_plain(theirs)}, but {other} is {_plain(ours)}: a pair needs the same"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_stages(
    pool: dict[str, Any], config: Path, engines: Iterable[EngineFlag], found: Mistakes
) -> Iterable[EngineFlag]:
    """Add the engines of a stage configuration to a pool, in the schema's form, and set its
    contract if there are pairs.

    `engines` are those of the command line. Return those that belong to no stage. Mistakes are
    added to `found`: each names the key and the file.
    """
    port, connector = (
        None if found.within("pools", 0, name) else pool.get(name)
        for name in ("bootstrap_port", "connector")
    )
    file = ForeignFile(f" (stage config {spell_file(config)})")
    try:
        found_twice = Mistakes()
        tree = read_yaml(config, found_twice)
        found_twice.raise_any()
        stages = Reader(file).stages(tree)
        found_pairs = pairs(stages, file)
        # the file names it
        contract = check(found_pairs, file, None if connector == registry.AUTO else connector)
        urls, rest = _urls(stages, list(engines), file)
        bootstraps = (
            contract is not None
            and entry_of(contract).capabilities.peers_from is PeerSource.BOOTSTRAP
        )
        nodes = _nodes(
            stages, found_pairs, urls, (port or VLLM_BOOTSTRAP_PORT) if bootstraps else None, file
        )
    except SettingsError as error:
        found.add(("pools",), *error.mistakes)
        return ()
    if contract is not None:
        pool["connector"] = contract
    pool.setdefault("nodes", []).extend(nodes)
    return rest


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
                f"--{role}: {len(given)} given, expected {len(without)}: one for each {role} "
                f"stage without a URL of its own "
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
    stages: tuple[Stage, ...],
    found: tuple[StagePair, ...],
    urls: dict[int, str],
    port: int | None,
    file: ForeignFile,
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
        text = (
            f"its Mooncake bootstrap server would be at {address}, like that of "
            f"{spell_key(other.path)}: give each its own"
        )
        raise file.wrong(stage.path, f"{text} mooncake_bootstrap_port")
