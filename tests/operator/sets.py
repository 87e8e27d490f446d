"""Resources that people have: the objects of each set are judged by several tests, and are files
for readers of changes.
"""

from __future__ import annotations

from typing import NamedTuple

from pdproxy_operator.engine_objects import engine_objects
from pdproxy_operator.pools import pools_of, selected_pools
from pdproxy_operator.proxy_objects import proxy_objects
from pdproxy_operator.resources import Object, Proxy, Runtime, selects
from tests.operator.resources import proxy, runtime

_CUSTOM = '--kv-transfer-config={"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'


class Set(NamedTuple):
    """Resources of one namespace."""

    runtimes: list[Runtime]
    proxies: list[Proxy]


SETS = {
    "2p2d": Set(
        [
            runtime("llama-prefill", "prefill", replicas=2),
            runtime("llama-decode", "decode", replicas=2, args=["--max-num-seqs=256"]),
        ],
        [proxy("llama")],
    ),
    "1p3d_of_groups": Set(
        [
            runtime("big-prefill", "prefill", tensorParallelSize=8),
            runtime("big-decode", "decode", replicas=3, tensorParallelSize=16, groupSize=2),
        ],
        [proxy("big")],
    ),
    "any_with_autoscaling": Set(
        [
            runtime(
                "qwen",
                "any",
                replicas=4,
                dataParallelSize=2,
                autoscaling={"minReplicas": 2, "maxReplicas": 8, "scaleDownSeconds": 600},
            )
        ],
        [proxy("qwen", budget={"gpus": 16})],
    ),
    "mooncake": Set(
        [
            runtime("p", "prefill", connector="mooncake", servesWhole=True),
            runtime("d", "decode", connector="mooncake"),
        ],
        [proxy("mooncake")],
    ),
    "shared": Set(
        [
            runtime(
                role,
                role,
                connector="shared",
                kvTransferConfig={
                    "kv_connector": "ExampleConnector",
                    "kv_connector_extra_config": {"shared_storage_path": "/kv"},
                },
                template={
                    "spec": {
                        "containers": [
                            {"name": "engine", "volumeMounts": [{"name": "kv", "mountPath": "/kv"}]}
                        ],
                        "volumes": [{"name": "kv", "persistentVolumeClaim": {"claimName": "kv"}}],
                    }
                },
            )
            for role in ("prefill", "decode")
        ],
        [proxy("storage")],
    ),
    "custom": Set(
        [runtime(role, role, connector="custom", args=[_CUSTOM]) for role in ("prefill", "decode")],
        [
            proxy(
                "lmcache",
                config={"pools": [{"name": "Qwen-Qwen3-0.6B-custom", "connector": "lmcache-mp"}]},
            )
        ],
    ),
    "simulated": Set(
        [
            runtime(
                role,
                role,
                simulated=True,
                image="pdproxy:0.1.0",
                connector="nixl-push",
                model={"name": "org/model", "served": "model"},
            )
            for role in ("prefill", "decode")
        ],
        [proxy("try")],
    ),
    "keys_route_monitor": Set(
        [runtime(role, role, labels={"rack": role[0]}) for role in ("prefill", "decode")],
        [
            proxy(
                "front",
                clientKeys={"name": "clients", "key": "keys"},
                adminKeys={"name": "admins", "key": "keys"},
                engineKey={"name": "engines", "key": "key"},
                route={"parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example.com"]},
                monitor={
                    "labels": {"release": "prometheus"},
                    "authorization": {"name": "prometheus"},
                },
                service={"type": "LoadBalancer", "port": 8080},
            )
        ],
    ),
    "two_proxies": Set(
        [
            runtime("plain", "aggregated"),
            runtime("prefill", "prefill"),
            runtime("decode", "decode"),
        ],
        [
            proxy("inside"),
            proxy(
                "outside",
                config={
                    "listen": {
                        "port": 8443,
                        "tls": {"certificate": "/tls/tls.crt", "key": "/tls/tls.key"},
                    }
                },
                template={
                    "spec": {
                        "containers": [
                            {
                                "name": "pdproxy",
                                "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
                            }
                        ],
                        "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
                    }
                },
            ),
        ],
    ),
}


def objects_of(name: str) -> list[Object]:
    """The objects that the operator makes of a set, all engines in their pool's revision."""
    runtimes, proxies = SETS[name]
    found = [one for it in proxies for one in proxy_objects(it, selected_pools(it, runtimes), None)]
    for _, pool in pools_of(proxies, runtimes):
        for one in pool.runtimes:
            fronts = [
                it for it in proxies if selects(it.spec.runtime_selector, one.metadata.labels)
            ]
            found += engine_objects(one, pool, fronts, {pool.revision: one.spec.replicas})
    return found
