"""Starts a prefill and a decode engine with a connector other than NIXL, and the plain engine to
compare with.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.fakes.ports import free_port

from .engine import MODEL, Engine, Role
from .fleet import COMPLETIONS, Fleet
from .launcher import Launcher

CONNECTORS = Path(__file__).with_name("connectors")
CHUNK = 32
"""Tokens per chunk of LMCache: small, so that short prompts have whole chunks."""


@dataclass(frozen=True)
class PairOptions:
    """Additional options of both engines: `kv` for --kv-transfer-config, `flags` for `vllm serve`,
    `env` by role.
    """

    kv: Mapping[str, Any]
    flags: str = ""
    env: Mapping[Role, dict[str, str]] = field(default_factory=dict)


@contextlib.contextmanager
def pair(
    launcher: Launcher, plain: Engine, name: str, options: PairOptions, decode_kv: Mapping[str, Any]
) -> Iterator[Fleet]:
    """Start and warm up both engines; yield them with `plain` as a fleet. `plain` has another owner
    and keeps running.

    `decode_kv`: additions to the decode engine's --kv-transfer-config.
    """
    engines: dict[str, Engine] = {}
    fleet = Fleet(launcher, {"plain": plain})
    roles: dict[Role, Mapping[str, Any]] = {
        "prefill": options.kv,
        "decode": {**options.kv, **decode_kv},
    }
    try:
        for role, kv in roles.items():
            one = f"{name}-{role[0]}"
            start = partial(
                Engine.start,
                launcher,
                one,
                role,
                flags=options.flags,
                kv=dict(kv),
                env=options.env.get(role),
            )
            fleet.starts[one] = start
            engines[one] = start(0)
        for engine in engines.values():
            engine.wait()
            engine.post(
                COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
            )
        fleet.engines |= engines
        yield fleet
    finally:
        # A test may have started some again.
        started = [
            *engines.values(),
            *(engine for engine in fleet.engines.values() if engine is not plain),
        ]
        for engine in started:
            engine.terminate()
        for engine in started:
            engine.stop()


def by_files(folder: Path) -> PairOptions:
    """vLLM's ExampleConnector: the prefill engine writes a prompt's KV to files, the decode engine
    reads them.
    """
    extra = {"shared_storage_path": str(folder)}
    return PairOptions({"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra})


@dataclass(frozen=True)
class Ports:
    """Ports of LMCache's PD mode: of a decode engine's rank for transfers and for allocations, of
    the proxy for notices.
    """

    init: int = field(default_factory=free_port)
    alloc: int = field(default_factory=free_port)
    notices: int = field(default_factory=free_port)


def by_lmcache(
    folder: Path, ports: Ports, connector: Mapping[str, Any], buffer: int = 1 << 28
) -> PairOptions:
    """LMCache's PD mode, in which the prefill engine pushes. `buffer`: bytes of the decode engine's
    buffer.
    """
    common = {
        "local_cpu": False,
        "chunk_size": CHUNK,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "nixl_backends": ["UCX"],
        "pd_backend_mode": "sync",
        "pd_buffer_device": "cpu",
        "pd_buffer_size": buffer,
    }
    sender = {"pd_role": "sender", "pd_proxy_host": "127.0.0.1", "pd_proxy_port": ports.notices}
    receiver: dict[str, object] = {"pd_role": "receiver", "pd_peer_host": "127.0.0.1"}
    receiver |= {"pd_peer_init_port": ports.init, "pd_peer_alloc_port": ports.alloc}
    env: dict[Role, dict[str, str]] = {}
    own: dict[Role, dict[str, Any]] = {"prefill": sender, "decode": receiver}
    for role, settings in own.items():
        config = folder / f"lmcache-{role}.yaml"
        config.write_text(json.dumps(common | settings, indent=1))  # JSON is YAML
        env[role] = {"LMCACHE_CONFIG_FILE": str(config), "PYTHONPATH": str(CONNECTORS)}
    return PairOptions(connector, "--no-enable-prefix-caching", env)


CPU_LMCACHE = {"kv_connector": "CpuLMCacheConnector", "kv_connector_module_path": "cpu_lmcache"}
"""LMCache, with the code that it lacks on a CPU."""
BARE_LMCACHE = {"kv_connector": "LMCacheConnectorV1"}
"""Unmodified LMCache: on a CPU it serves, but sends neither KV nor notices."""
DECODES_BEHIND = {"kv_connector_extra_config": {"skip_last_n_tokens": 1}}
"""The decode engine's prompt ends with the answer's first token, which has no KV yet: it looks for
the KV before it.
"""


def lmcache_settings(fleet: Fleet, ports: Ports, **more: Any) -> dict[str, Any]:
    """Return the proxy's settings for such a pair; `more`: additions to the pool's `lmcache`."""
    receiver = {"init_ports": [ports.init], "alloc_ports": [ports.alloc]}
    engines: list[dict[str, object]] = [
        {"url": engine.url, "role": "prefill"} for engine in fleet.prefills
    ]
    engines += [
        {"url": engine.url, "role": "decode", "receiver": receiver} for engine in fleet.decodes
    ]
    pool = {"connector": "lmcache-pd", "lmcache": {"chunk_size": CHUNK} | more, "nodes": engines}
    return {"pools": [pool], "kv_ready": {"port": ports.notices}}
