"""The settings file of the proxy in front of the engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pdproxy_lab.up.arrangement import Plan, PlannedEngine
from pdproxy_lab.up.machine import LOOPBACK
from pdproxy_lab.up.options import UpOptions

_GPU_DEADLINES = {"connect": 1, "prefill": 60, "first_token": 20, "between_tokens": 15}
"""As in configs/gpu-2p2d.yaml, which gives the reasons."""
CONTINUATIONS = 2
"""How often a stream may go on with another engine: engines of one machine often fail together."""


def settings_tree(plan: Plan, options: UpOptions, admin: str | None) -> Mapping[str, Any]:
    """Return the settings. `admin`: the address of the admin API; None: it has none."""
    pool: dict[str, Any] = {"connector": "nixl"}
    if options.slo:
        wanted = {name: getattr(options.slo, name) for name in ("ttft", "tpot", "gap")}
        pool["slo"] = {name: value for name, value in wanted.items() if value is not None}
    if options.profile is not None:
        pool["profile"] = options.profile
    if plan.events_port is not None:
        pool["kv_events"] = {"enabled": True, "host": LOOPBACK, "port": plan.events_port}
    pool["nodes"] = [_node(engine, plan) for engine in plan.engines]
    tree: dict[str, Any] = {}
    if admin is not None:
        tree["listen"] = {"admin": admin}
    tree["pools"] = [pool]
    if plan.threads is None:
        tree["deadlines"] = dict(_GPU_DEADLINES)
    # an engine that has ended or has come back is noticed sooner
    tree["probes"] = {"interval": 1}
    tree["limits"] = {"continuations": CONTINUATIONS}
    return tree


def settings_text(tree: Mapping[str, Any]) -> str:
    """Return the settings as YAML."""
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)


def _node(engine: PlannedEngine, plan: Plan) -> Mapping[str, Any]:
    node: dict[str, Any] = {"url": f"http://{LOOPBACK}:{engine.port}", "role": engine.role}
    if engine.role == "prefill" and sum(one.role == "decode" for one in plan.engines) == 1:
        # while the only decode engine starts again
        node["serves_whole"] = True
    facts: dict[str, Any] = {}
    if (chunk := plan.chunks.get(engine.role)) is not None:
        facts["max_num_batched_tokens"] = chunk
    if plan.max_num_seqs is not None:
        facts["max_num_seqs"] = plan.max_num_seqs
    if plan.events_port is not None:
        facts["kv_events"] = {
            "endpoint": f"tcp://{LOOPBACK}:{plan.events_port}",
            "replay_endpoint": f"tcp://{LOOPBACK}:{engine.replay_port}",
            "topic": engine.name,
        }
    if facts:
        node["facts"] = facts
    return node
