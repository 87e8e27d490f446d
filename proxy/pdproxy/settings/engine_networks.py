"""The section `engines`: in which networks engines may be."""

from __future__ import annotations

from pdproxy.kit.addresses import read_network
from pdproxy.kit.engine_networks import EngineNetworks
from pdproxy.settings.section import Section, Text


class EngineSettings(Section, frozen=True):
    """What holds for all engines, wherever they are named: here, by DNS, by the admin API."""

    networks: tuple[Text, ...] = ()
    """Networks in which engines may be, such as [10.1.0.0/16]: the proxy connects to no other address, whatever a name resolves
    to, and KV handles and registrations may name no other. facts.remote_host, facts.bootstrap and receiver.host must be addresses
    then, or the host of the engine's URL: other engines would resolve a name. []: all but link-local, multicast, reserved and
    unspecified addresses, and those at which clouds hand out credentials (169.254.169.254 and others)."""

    @property
    def allowed(self) -> EngineNetworks:
        """These networks. Raises ValueError for a text that is none."""
        return EngineNetworks([read_network(text) for text in self.networks])
