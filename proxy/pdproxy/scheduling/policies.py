"""The policies by their names in the settings. A new one is a module beside `least_load`, and an entry in `POLICIES`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.nodes import Role
from pdproxy.scheduling.policy import Policy, PolicyFactory

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType({"least_load": LeastLoad})
"""What `pools[].policy.prefill` and `pools[].policy.decode` may be."""


def names() -> tuple[str, ...]:
    """Return the names of all policies."""
    return tuple(POLICIES)


def make_policies(factories: Mapping[Role, PolicyFactory]) -> dict[Role, Policy]:
    """Return a policy of its own for each role that an engine can have for a request.

    Without a factory: `LeastLoad`; for aggregated engines that of decode.
    """
    decode = factories.get(Role.DECODE, LeastLoad)
    defaults = {Role.PREFILL: LeastLoad, Role.DECODE: LeastLoad, Role.AGGREGATED: decode}
    return {role: factories.get(role, default)(role) for role, default in defaults.items()}
