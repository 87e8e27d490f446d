"""The settings of a PDProxy's proxies: its `config` over what the operator sets, and the pools of
the runtimes that it selects.

The Helm chart makes the same settings (configs/chart/templates/_config.tpl), and a test compares
both.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pdproxy.app.drain import longest_drain
from pdproxy.engine_model.profile import shipped
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import settings_of
from pdproxy.settings.schema import Settings
from pdproxy_operator.errors import ConfigError
from pdproxy_operator.names import all_name, engines_selector, replicas_name
from pdproxy_operator.pools import Pool
from pdproxy_operator.resources import Object, Proxy, Runtime

KEYS = "/etc/pdproxy-keys"
"""The folder of the files with keys, a folder for each kind of key."""
RUN = "/run/pdproxy"
"""The folder that the proxies write to."""
MAX_CONFIG = 64 << 10
"""Bytes of `config` as JSON: a check of 1000 engines in it takes most of a second, each time."""
_PORT = 8000
_FACTS_OF_ARGS = ("max_num_seqs", "max_num_batched_tokens")
"""Facts that are flags of the engine, too: the proxies can't ask it for them."""
_POOL = re.compile(r"\bpools\[([0-9]{1,4})\]")
_PODS = re.compile(r"podss?://([^/:]*)", re.IGNORECASE)
_INFERENCE_POOLS = re.compile(r"inferencepools?://", re.IGNORECASE)
_STOP_SECONDS = 20
"""Behind the longest drain, until Kubernetes kills what still runs."""


class ProxySettings(NamedTuple):
    """`content`: of `pdproxy.yaml`. `checked`: the same as pdproxy reads it, but for files that it
    names.
    """

    content: Object
    checked: Settings

    @property
    def finds_pods(self) -> bool:
        """Whether the proxies look for pods."""
        return any(_PODS.match(node.url) for pool in self.checked.pools for node in pool.nodes)

    @property
    def has_engines_elsewhere(self) -> bool:
        """Whether some engines are no pods."""
        return not all(_PODS.match(node.url) for pool in self.checked.pools for node in pool.nodes)

    @property
    def grace_seconds(self) -> int:
        """How long a proxy may take to end: the longest drain, and more."""
        longest = longest_drain(self.checked.deadlines, self.checked.listen.linger)
        return math.ceil(longest) + _STOP_SECONDS


def proxy_settings(proxy: Proxy, pools: Sequence[Pool], key_hash: str | None) -> ProxySettings:
    """Return the settings of the proxies. `pools`: of all runtimes that the PDProxy selects.
    `key_hash`: of the key by which the operator reads the metrics of the proxies, None: it has
    none.

    Raises:
        ConfigError: `pdproxy serve` would refuse the settings, or they can't work in a cluster.
    """
    try:
        return _settings(proxy, pools, key_hash)
    except RecursionError:
        raise ConfigError("config: nested too deeply") from None


def _settings(proxy: Proxy, pools: Sequence[Pool], key_hash: str | None) -> ProxySettings:
    config = proxy.spec.config
    if (size := len(msgspec.json.encode(config))) > MAX_CONFIG:
        raise ConfigError(f"config has {size} bytes as JSON: {MAX_CONFIG} are the most")
    own: Object = {"listen": {"admin": f"unix:{RUN}/admin.sock"}}
    if "replicas" not in config:
        own["replicas"] = {"count": "auto", "name": replicas_name(proxy.metadata.name)}
    auth = {
        name: f"{KEYS}/{folder}/{secret.key}"
        for name, folder, secret in (
            ("api_keys_file", "clients", proxy.spec.client_keys),
            ("admin_keys_file", "admin", proxy.spec.admin_keys),
            ("engine_api_key_file", "engines", proxy.spec.engine_key),
        )
        if secret is not None
    }
    if auth:
        own["auth"] = auth
    _refuse_equal_names(pools)
    merged_pools = _pools(pools, config.get("pools"))
    if any(_PODS.match(url) for url in _urls(merged_pools)):
        own["kubernetes"] = {"cache_file": f"{RUN}/pods.json"}
    merged = _merged(own, config)
    if merged_pools:
        merged["pools"] = merged_pools
    if key_hash is not None:
        _add_digest(merged, key_hash)
    _refuse_unnamed_connectors(merged, pools)
    checked = _checked(merged)
    _refuse_what_cannot_work(checked)
    return ProxySettings(merged, checked)


def port_of(proxy: Proxy) -> int:
    """Return the port at which its proxies listen. Clients use that of the Service."""
    port = _listen(proxy).get("port")
    return port if isinstance(port, int) else _PORT


def scheme_of(proxy: Proxy) -> str:
    """Return whether its proxies speak http or https."""
    tls = _listen(proxy).get("tls")
    return "https" if isinstance(tls, dict) and tls.get("certificate") else "http"


def url_of_all(proxy: Proxy) -> str:
    """Return the URL of the Service that has an address for each proxy, ready or not."""
    return f"{scheme_of(proxy)}://{all_name(proxy.metadata.name)}:{port_of(proxy)}"


def _listen(proxy: Proxy) -> Object:
    listen = proxy.spec.config.get("listen")
    return listen if isinstance(listen, dict) else {}


def _pools(pools: Sequence[Pool], more: Any) -> Any:
    """Return the pools of the operator and those of `config`, and one of both where they have one
    name: with the settings of `config`, and the engines of both.
    """
    made: list[Object] = [
        {
            "name": pool.name,
            "connector": "auto" if pool.connector == "custom" else pool.connector,
            "nodes": [_node(one) for one in pool.runtimes],
        }
        for pool in pools
    ]
    if not isinstance(more, list):
        return more or made  # what is no list is refused by its name
    by_name = {one["name"]: one for one in made}
    for one in more:
        before = by_name.get(str(one.get("name"))) if isinstance(one, dict) else None
        if before is None:
            made.append(one)
            continue
        nodes = one.get("nodes") or []
        changed = _merged(before, one)
        changed["nodes"] = [*before["nodes"], *nodes] if isinstance(nodes, list) else nodes
        before.update(changed)
    return made


def _node(runtime: Runtime) -> Object:
    spec = runtime.spec
    url = f"pods://:{_PORT}/{engines_selector(runtime)}"
    node: Object = {"url": url, "role": spec.role}
    facts: Object = {}
    if spec.data_parallel_size > 1:
        facts["data_parallel_size"] = spec.data_parallel_size
    if not spec.simulated:
        facts["tensor_parallel_size"] = spec.tensor_parallel_size
    for fact in _FACTS_OF_ARGS:
        if (number := _number(spec.args, f"--{fact.replace('_', '-')}")) is not None:
            facts[fact] = number
    if facts:
        node["facts"] = facts
    if spec.serves_whole:
        node["serves_whole"] = True
    if spec.labels:
        node["labels"] = spec.labels
    return node


def _number(args: Sequence[str], flag: str) -> int | None:
    """Return the value of a flag, the last one that is given; None: none, or no number."""
    found = None
    for word, after in zip(args, (*args, "")[1:], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else after
    return int(found) if found is not None and found.isascii() and found.isdecimal() else None


def _merged(base: Object, changes: Object) -> Object:
    merged = copy.deepcopy(base)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merged(before, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _add_digest(content: Object, digest: str) -> None:
    auth = content.setdefault("auth", {})
    if isinstance(auth, dict):
        others = auth.get("reader_key_digests") or []
        if isinstance(others, list):
            auth["reader_key_digests"] = [digest, *others]


def _checked(content: Object) -> Settings:
    """Return the settings as `pdproxy serve` reads them."""
    if not content.get("pools"):
        raise ConfigError(
            "no engines: no PDRuntime has the labels of runtimeSelector, and config.pools has none"
        )
    try:
        return settings_of(_without_files(content))
    except SettingsError as error:
        raise ConfigError(f"the settings are refused: {_by_names(str(error), content)}") from None


def _by_names(text: str, content: Object) -> str:
    """Return mistakes with the names of pools: numbers are not those of `config`, since the pools
    of runtimes come first.
    """
    pools = content["pools"]

    def named(match: re.Match[str]) -> str:
        pool = pools[at] if (at := int(match[1])) < len(pools) else None
        return f"pools[{pool.get('name', 'default')}]" if isinstance(pool, dict) else match[0]

    return _POOL.sub(named, text) if isinstance(pools, list) else text


def _without_files(content: Object) -> Object:
    """Return the settings without the names of files that the check would read: the files are of
    the proxies' pods, and those of the operator's pod are not for the owner of a PDProxy.
    """
    content = copy.deepcopy(content)
    stand_in = min(shipped())
    pools = content.get("pools")
    for pool in pools if isinstance(pools, list) else ():
        if not isinstance(pool, dict):
            continue
        nodes = pool.get("nodes")
        facts = [
            one["facts"]
            for one in (nodes if isinstance(nodes, list) else ())
            if isinstance(one, dict) and isinstance(one.get("facts"), dict)
        ]
        for part in (pool, *facts):
            name = part.get("profile")
            if isinstance(name, str) and "/" in name:
                part["profile"] = stand_in
    return content


def _refuse_equal_names(pools: Sequence[Pool]) -> None:
    by_name = {pool.name: pool for pool in pools}
    for pool in pools:
        if by_name[pool.name] is not pool:
            raise ConfigError(
                f"the pools of the models {pool.model} and {by_name[pool.name].model} would have "
                f"one name, {pool.name}: select them by two PDProxies"
            )


def _refuse_unnamed_connectors(content: Object, pools: Sequence[Pool]) -> None:
    """Pods can't be asked for their connector, and `custom` does not say which one it is."""
    custom = {pool.name for pool in pools if pool.connector == "custom"}
    merged = content.get("pools")
    for one in merged if isinstance(merged, list) else ():
        name = str(one.get("name")) if isinstance(one, dict) else ""
        if name in custom and one["connector"] == "auto":
            raise ConfigError(
                f"pool {name}: its PDRuntimes have connector custom: say in config.pools by which "
                f"connector the proxies ask for KV, such as [{{name: {name}, connector: shared}}]"
            )


def _refuse_what_cannot_work(settings: Settings) -> None:
    listen = settings.listen
    if listen.uds is not None:
        raise ConfigError("config.listen.uds: nobody outside of the pod reaches a Unix socket")
    if listen.tls.client_ca is not None:
        raise ConfigError(
            "config.listen.tls.client_ca: the probes of Kubernetes have no certificate: check "
            "clients' certificates at a gateway in front"
        )
    for pool in settings.pools:
        for node in pool.nodes:
            match = _PODS.match(node.url)
            if _INFERENCE_POOLS.match(node.url) or (match is not None and match[1]):
                raise ConfigError(
                    f"pool {pool.name}: {node.url}: the operator gives rights for the pods "
                    "of its own namespace alone: pods://:PORT/LABEL_SELECTOR"
                )


def _urls(pools: Any) -> list[str]:
    return [
        one["url"]
        for pool in (pools if isinstance(pools, list) else ())
        if isinstance(pool, dict) and isinstance(pool.get("nodes"), list)
        for one in pool["nodes"]
        if isinstance(one, dict) and isinstance(one.get("url"), str)
    ]
