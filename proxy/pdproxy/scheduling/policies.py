"""The policies by their names in the settings. Another one: a file beside `least_load`, and two lines here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.nodes import Role
from pdproxy.scheduling.policy import Policy, PolicyFactory

PolicyName = Literal["least_load"]
"""What `pools[].policy.prefill` and `pools[].policy.decode` may be: the settings refuse any other name."""

POLICIES: dict[PolicyName, PolicyFactory] = {"least_load": LeastLoad}


def make_policies(factories: Mapping[Role, PolicyFactory]) -> dict[Role, Policy]:
    """Return a policy of its own for each role. A role without a factory gets `LeastLoad`, but aggregated engines decode's."""
    decode = factories.get(Role.DECODE, LeastLoad)
    defaults = {role: decode if role is Role.AGGREGATED else LeastLoad for role in Role}
    return {role: factories.get(role, default)(role) for role, default in defaults.items()}
