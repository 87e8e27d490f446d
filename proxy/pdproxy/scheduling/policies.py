"""The policies by their names in the settings. A new one is a module beside `least_load`, and an
entry in `_OWN`.

Other packages bring policies, too: by entry points of the group `pdproxy.policies`
(docs/guide/policies.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdproxy.kit.plugins import PluginError, plugins
from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.ledger_engine import ALL_USES, Role
from pdproxy.scheduling.policy import Cached, Policy, PolicyContext, PolicyFactory, no_chance
from pdproxy.scheduling.power_of_two import PowerOfTwo
from pdproxy.scheduling.prefix_policy import Prefix
from pdproxy.scheduling.random_choice import RandomChoice
from pdproxy.scheduling.round_robin import RoundRobin
from pdproxy.scheduling.session import Session


def least_load(context: PolicyContext) -> Policy:
    """Return the policy `least_load`, which is the default of every role."""
    return LeastLoad(context.role)


_OWN: Mapping[str, PolicyFactory] = {
    "least_load": least_load,
    "round_robin": lambda context: RoundRobin(context.role),
    "random": lambda context: RandomChoice(context.chance),
    "power_of_two": lambda context: PowerOfTwo(context.role, context.chance),
    "session": lambda context: Session(context.role),
    "prefix": lambda context: Prefix(context.role, context.cached),
}


def _of_others() -> dict[str, PolicyFactory]:
    """Return the policies of other packages.

    Raises:
        PluginError: one of them can't be used.
    """
    found: dict[str, PolicyFactory] = {}
    for name, factory in plugins("pdproxy.policies", _OWN).items():
        if not callable(factory):
            raise PluginError(
                f"the plugin {name!r} of pdproxy.policies is no function that makes a policy"
            )
        found[name] = factory
    return found


POLICIES: Mapping[str, PolicyFactory] = MappingProxyType({**_OWN, **_of_others()})
"""What `pools[].policy.prefill` and `pools[].policy.decode` may be."""


ASK_THE_INDEX = frozenset({"prefix"})
"""Those that ask what engines have in their caches. Nothing is known of that where none of them is
chosen.
"""


def names() -> tuple[str, ...]:
    """Return the names of all policies."""
    return tuple(POLICIES)


class Policies:
    """The policies in use. `by_role`: one for each role; `by_uses`: those that rank engines with
    these uses.
    """

    def __init__(self, chance: Callable[[], float], cached: Cached | None) -> None:
        self._chance = chance
        self._cached = cached
        self.by_role: dict[Role, Policy] = {}
        self.by_uses: dict[frozenset[Role], tuple[Policy, ...]] = {}

    def use(self, factories: Mapping[Role, PolicyFactory]) -> bool:
        """Use other ones. Return whether any that chooses for a prompt reads the details of an
        `Ask`.

        They see the engines' present load, and nothing else of what was before.
        """
        self.by_role.update(make_policies(factories, self._chance, self._cached))
        for uses in ALL_USES:
            self.by_uses[uses] = tuple(
                policy for role, policy in self.by_role.items() if role in uses
            )
        return any(
            one.needs_details for role, one in self.by_role.items() if role is not Role.ENCODE
        )


def make_policies(
    factories: Mapping[Role, PolicyFactory],
    chance: Callable[[], float] = no_chance,
    cached: Cached | None = None,
) -> dict[Role, Policy]:
    """Return a policy of its own for each role that an engine can have for a request.

    Without a factory: `LeastLoad`; for aggregated engines that of decode; for encoder engines
    `Session`: one medium goes to one engine, whose cache has its outputs. `chance` and `cached`:
    see `PolicyContext`.
    """
    decode = factories.get(Role.DECODE, least_load)
    defaults = {
        Role.ENCODE: _OWN["session"],
        Role.PREFILL: least_load,
        Role.DECODE: least_load,
        Role.AGGREGATED: decode,
    }
    return {
        role: factories.get(role, default)(PolicyContext(role, chance, cached))
        for role, default in defaults.items()
    }
