"""The section `engines`: in which networks engines may be."""

from __future__ import annotations

from pdproxy.kit.addresses import read_network
from pdproxy.kit.engine_networks import EngineNetworks
from pdproxy.settings.section import Section, Text


class EngineSettings(Section, frozen=True):
    """What holds for all engines, wherever they are named: in the settings, by DNS, by the admin API."""

    networks: tuple[Text, ...] = ()
    """Networks in which engines may be, and which KV handles may name. None given: all but link-local, multicast, reserved and
    unspecified addresses and those of clouds' metadata."""

    @property
    def allowed(self) -> EngineNetworks:
        """These networks. Raises ValueError for a text that is none."""
        return EngineNetworks([read_network(text) for text in self.networks])
