"""What vLLM is told about moving KV: --kv-transfer-config by role and connector."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdproxy_operator.errors import ConfigError
from pdproxy_operator.resources import Connector, Object, Role, RuntimeSpec

_NAMES: Mapping[Connector, str] = MappingProxyType(
    {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector", "mooncake": "MooncakeConnector"}
)
_KV_ROLES: Mapping[Role, str] = MappingProxyType(
    {"prefill": "kv_producer", "decode": "kv_consumer", "any": "kv_both"}
)


def transfer_config(spec: RuntimeSpec) -> Object | None:
    """Return the value of --kv-transfer-config. None: the operator sets no such flag, since the
    engine moves no KV, is simulated, or has a flag of the user's own (connector custom).

    Raises:
        ConfigError: nothing says which of vLLM's connectors it is.
    """
    if spec.simulated or spec.role == "aggregated" or spec.connector == "custom":
        return None
    config: Object = {"kv_role": _KV_ROLES[spec.role]}
    if spec.connector in _NAMES:
        config["kv_connector"] = _NAMES[spec.connector]
    config |= spec.kv_transfer_config
    if not config.get("kv_connector"):
        raise ConfigError(f"connector {spec.connector} needs kvTransferConfig.kv_connector")
    return config
