"""What stages of vllm-omni must have in common before a request's KV is sent from one to the other.

Source: vllm-omni's `pd_utils` (PR 1303), which allows one pair; vLLM 0.32.0's connectors for what each allows. Here a file may
have any number of pairs, if one contract can run all of them. Mistakes that engines would find at the first request, or never,
are reported at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pdproxy.settings.errors import spell_key
from pdproxy.settings.external_file import ForeignFile
from pdproxy.settings.stages import Stage, StageId
from pdproxy.transfer import registry


class Pair(NamedTuple):
    """A prefill stage and a decode stage that takes its KV."""

    prefill: Stage
    decode: Stage


def pairs(stages: tuple[Stage, ...], file: ForeignFile) -> tuple[Pair, ...]:
    """Return the pairs that decode stages name in `engine_input_source`, by a stage's id or, if no stage has it, by its index.

    No stage flagged: no pairs. A source that is no prefill stage has another meaning in vllm-omni, and is ignored.

    Raises:
        SettingsError: a flagged stage is in no pair.
    """
    prefills = [stage for stage in stages if stage.role == "prefill"]
    places: dict[StageId, Stage] = {stage.index: stage for stage in prefills}
    named = places | {stage.id: stage for stage in prefills}
    found: list[Pair] = []
    for decode in (stage for stage in stages if stage.role == "decode"):
        sources = dict.fromkeys(named[source].index for source in decode.sources if source in named)
        if not sources:
            known = ", ".join(str(stage.id) for stage in prefills) or "there is none"
            raise file.wrong((*decode.path, "engine_input_source"), f"names no prefill stage ({known})")
        found += [Pair(places[index], decode) for index in sources]
    used = {pair.prefill.index for pair in found}
    for prefill in prefills:
        if prefill.index not in used:
            raise file.wrong(prefill.path, "no decode stage names it in engine_input_source")
    return tuple(found)


def check(found: tuple[Pair, ...], file: ForeignFile, connector: str | None = None) -> str | None:
    """Return the contract that can run all pairs, None without pairs. `connector` is the operator's choice, if any.

    Raises:
        SettingsError: naming the keys of two stages that do not match, or a contract that is not possible.
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

    `engine_host`: the host of its engine's HTTP server, used if the file names no other. `port`: used if the file names none.
    """
    address = prefill.kv.extra.get("bootstrap_server_address")
    if isinstance(address, str) and address:
        return f"http://{address}"
    host = prefill.kv.ip or engine_host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{prefill.bootstrap_port or port}"


def _same_connector(pair: Pair, file: ForeignFile) -> None:
    if pair.prefill.kv.connector != pair.decode.kv.connector:
        raise file.wrong(*_mismatch(pair, "kv_connector", pair.prefill.kv.connector, pair.decode.kv.connector))


def _contract(stages: list[Stage], file: ForeignFile, connector: str | None) -> str | None:
    if not stages:
        return None
    first = stages[0]
    for stage in stages:
        if stage.kv.connector != first.kv.connector:
            text = f"{stage.kv.connector}, but {spell_key((*first.path, *_KV, 'kv_connector'))} is {first.kv.connector}"
            raise file.wrong((*stage.path, *_KV, "kv_connector"), f"{text}: a pool has one contract")
    path, name = (*first.path, *_KV, "kv_connector"), first.kv.connector
    able = registry.serving(name)
    if not able and connector is None:
        raise file.wrong(path, f"it is not known which contract {name} runs: name one by --connector")
    if able and connector is not None and connector not in able:
        raise file.wrong(path, f"{name} runs {' or '.join(able)}, but the pool's connector is {connector}")
    return connector or able[0]


def _same_buffers(pair: Pair, file: ForeignFile) -> None:
    for name in ("kv_buffer_device", "kv_buffer_size"):
        ours, theirs = (getattr(stage.kv, name.removeprefix("kv_")) for stage in pair)
        if ours is not None and theirs is not None and ours != theirs:
            raise file.wrong(*_mismatch(pair, name, ours, theirs))


def _parallel_sizes(pair: Pair, file: ForeignFile, contract: str | None) -> None:
    sizes = [stage.tensor_parallel_size for stage in pair]
    smaller, larger = sorted(sizes)
    if smaller == larger or contract is None:
        return
    path = (*pair.decode.path, "engine_args", "tensor_parallel_size")
    prefill = f"stage {pair.prefill.id} prefills with {sizes[0]}"
    if registry.entry_of(contract).capabilities.mixed_parallel_sizes:
        if larger % smaller:
            raise file.wrong(path, f"{sizes[1]}, but {prefill}: one must be a multiple of the other")
    elif not all(_first_rank_stores(stage.kv.extra) for stage in pair):
        raise file.wrong(path, f"{sizes[1]}, but {prefill}: {contract} needs the same")


def _first_rank_stores(extra: Mapping[str, Any]) -> bool:
    """Return whether LMCache is configured so that its first rank holds all KV, as for MLA: then sizes don't matter."""
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


def _mismatch(pair: Pair, name: str, ours: object, theirs: object) -> tuple[tuple[str | int, ...], str]:
    other = spell_key((*pair.prefill.path, *_KV, name))
    return (*pair.decode.path, *_KV, name), f"{_plain(theirs)}, but {other} is {_plain(ours)}: a pair needs the same"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_KV = ("engine_args", "kv_transfer_config")
