"""Reads vllm-omni's stage configuration: which of its stages prefill, which decode, and how their engines transfer KV.

Source: vllm-omni's stage YAML and its `pd_utils` (PR 1303). A file has dozens of keys that only its engines need. Only the keys
that decide a pair are read and checked. Values are plain, or anything that describes itself by names
(`pdproxy.settings.mappings`). Owns the shape of a stage; `stage_checks` checks what makes two stages a pair, `stage_nodes` makes
engines of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pdproxy.kit.addresses import is_any
from pdproxy.settings.errors import KeyPath, Mistakes, spell_key
from pdproxy.settings.external_file import ForeignFile, spell
from pdproxy.settings.schema import Role

STAGES = "stage_args"
"""The key of the list of stages."""

BOOTSTRAP_ENV = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
"""The variable that sets vLLM's Mooncake bootstrap port; a stage sets it under `runtime.env`."""

StageId = int | str


class KvConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a stage's `kv_transfer_config` that a pair depends on. None: the file does not set it."""

    role: str
    connector: str
    engine_id: str | None = None
    ip: str | None = None
    buffer_device: str | None = None
    buffer_size: float | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that only prefills or only decodes. `index` is its index in the file, `id` its `stage_id`.

    `sources` are the stages whose output it takes, by id or by index. `bootstrap_port` is the port of its Mooncake bootstrap
    server, `url` the URL of its engine's HTTP server; None if the file does not name them.
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
            SettingsError: a line for each stage that is wrong: its key, what was expected and what was found.
        """
        stages = self._file.mapping(tree, ()).get(STAGES)
        if isinstance(stages, str | bytes) or not isinstance(stages, Sequence):
            raise self._file.wrong((STAGES,), f"expected vllm-omni's list of stages, got {spell((STAGES,), stages)}")
        known: dict[StageId, int] = {}
        found, mistakes = list[Stage](), Mistakes()
        for index, item in enumerate(stages):
            path: KeyPath = (STAGES, index)
            with mistakes.collecting(*path):
                stage = self._file.mapping(item, path)
                ident = self._id(stage.get("stage_id", index), (*path, "stage_id"))
                if ident in known:
                    raise self._file.wrong(
                        (*path, "stage_id"), f"{ident} is the id of {spell_key((STAGES, known[ident]))}, too"
                    )
                known[ident] = index
                role = self._role(stage, path)
                if role is not None:
                    found.append(self._stage(stage, index, ident, role))
        mistakes.raise_any()
        return tuple(found)

    def _role(self, stage: Mapping[str, Any], path: KeyPath) -> Role | None:
        prefills, decodes = (
            self._file.bool(stage.get(name), (*path, name)) for name in ("is_prefill_only", "is_decode_only")
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
            tensor_parallel_size=self._file.count(engine, "tensor_parallel_size", (*path, "engine_args")) or 1,
            bootstrap_port=self._bootstrap_port(runtime, kv, path),
            url=self._url(engine, runtime, path),
        )

    def _kv(self, engine: Mapping[str, Any], path: KeyPath, role: Role) -> KvConfig:
        given = engine.get("kv_transfer_config")
        if given is None:
            raise self._file.wrong(path, f"missing: a {role} stage needs one, with kv_connector and kv_role")
        if isinstance(given, str):  # JSON, as for the engine's own flag
            given = self._file.json(given, path)
        config = self._file.mapping(given, path)
        if not config:
            raise self._file.wrong(
                path, f"an empty mapping ({type(given).__name__}): expected kv_connector and kv_role"
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
                config.get("kv_connector_extra_config", {}), (*path, "kv_connector_extra_config"), may_be_null=True
            ),
        )

    def _bootstrap_port(self, runtime: Mapping[str, Any], kv: KvConfig, path: KeyPath) -> int | None:
        """Return the port. The engine reads its environment, vllm-omni's orchestrator the other key: they must agree."""
        env_path = (*path, "runtime", "env")
        env = self._file.mapping(runtime.get("env", {}), env_path, may_be_null=True)
        given = self._file.port(env, BOOTSTRAP_ENV, env_path)
        extra_path = (*path, "engine_args", "kv_transfer_config", "kv_connector_extra_config")
        extra = self._file.port(kv.extra, "mooncake_bootstrap_port", extra_path)
        if given is not None and extra is not None and given != extra:
            other = spell_key((*extra_path, "mooncake_bootstrap_port"))
            raise self._file.wrong((*env_path, BOOTSTRAP_ENV), f"{given}, but {other} is {extra}")
        return extra if given is None else given

    def _url(self, engine: Mapping[str, Any], runtime: Mapping[str, Any], path: KeyPath) -> str | None:
        """`runtime.url` is pdproxy's own key; `host` and `port` are those of `vllm serve`."""
        url, port = (
            self._file.text(runtime, "url", (*path, "runtime")),
            self._file.port(engine, "port", (*path, "engine_args")),
        )
        host = self._file.text(engine, "host", (*path, "engine_args"))
        if url is not None:
            if port is not None or host is not None:
                raise self._file.wrong(
                    (*path, "runtime", "url"), "excludes engine_args.host and engine_args.port: give one"
                )
            return url
        if port is None:
            if host is not None:
                raise self._file.wrong((*path, "engine_args", "host"), "has no effect without engine_args.port")
            return None
        if host is not None and is_any(host):
            raise self._file.wrong(
                (*path, "engine_args", "host"), f"{host} is an address to listen on: give runtime.url"
            )
        name = "127.0.0.1" if host is None else host
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def _sources(self, value: object, path: KeyPath) -> tuple[StageId, ...]:
        if value is None:
            return ()
        if isinstance(value, str | bytes) or not isinstance(value, Iterable) or isinstance(value, Mapping):
            raise self._file.wrong(path, f"expected a list of stages, got {spell(path, value)}")
        return tuple(self._id(item, (*path, index)) for index, item in enumerate(value))

    def _id(self, value: object, path: KeyPath) -> StageId:
        if isinstance(value, int | str) and not isinstance(value, bool) and value != "":
            return value
        raise self._file.wrong(path, f"expected a stage's number or name, got {spell(path, value)}")


_ROLES: dict[Role, tuple[str, ...]] = {
    "prefill": ("kv_producer", "kv_both"),
    "decode": ("kv_consumer", "kv_both"),
}
