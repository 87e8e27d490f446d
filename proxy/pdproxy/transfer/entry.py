"""One entry of the registry: what is known of a contract before it is built, and how it is built
from settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdproxy.transfer.contract import NO_CAPABILITIES, Capabilities, Contract
from pdproxy.transfer.peers import Peer
from pdproxy.transfer.signs import NO_SIGNS, ContractSigns
from pdproxy.wire.registrations import Registration


class NoOptions(msgspec.Struct, frozen=True):
    """For contracts that have no options."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A contract in the registry. Each contract's module declares its own."""

    name: str
    """What `pools[].connector` is set to."""

    build: Callable[[Any], Contract]
    """Returns the contract for an instance of `options`."""

    options: type[msgspec.Struct] = NoOptions
    """The contract's options. Each field is filled from the setting of the same name in
    `section`.
    """

    section: str = ""
    """Where these settings are, as a dotted path from `Settings`: `kv_ready`, `pool.lmcache`.
    Empty: it has no options.
    """

    capabilities: Capabilities = NO_CAPABILITIES
    """What the contract needs and can do."""

    registered: Callable[[Registration], tuple[Peer, ...] | str] | None = None
    """Where engines register: reads a registration. It returns the engine's ranks, or why the
    registration can't be used, as what follows an engine's name.
    """

    registration_port: int = 0
    """The port to which engines send their heartbeats in vLLM's examples; 0: they do not
    register.
    """

    kv_connectors: tuple[str, ...] = ()
    """The `kv_connector` names of vLLM's engines that can run this contract."""

    ignores_salt: bool = False
    """Whether KV may be found by a prompt's token ids alone, whatever its `cache_salt`, outside of
    the engines' own caches.
    """

    signs: ContractSigns = NO_SIGNS
    """What engines of the contract show, for the connector that is found by asking them."""

    @classmethod
    def of(
        cls,
        contract: Contract,
        *,
        kv_connectors: tuple[str, ...],
        signs: ContractSigns = NO_SIGNS,
        registered: Callable[[Registration], tuple[Peer, ...] | str] | None = None,
        registration_port: int = 0,
        ignores_salt: bool = False,
    ) -> Entry:
        """Return the entry of a contract that has no options."""
        return cls(
            name=contract.name,
            build=lambda _: contract,
            capabilities=contract.capabilities,
            registered=registered,
            registration_port=registration_port,
            kv_connectors=kv_connectors,
            ignores_salt=ignores_salt,
            signs=signs,
        )

    def contract(self, settings: object) -> Contract:
        """Build the contract with the options that settings give.

        Raises:
            AttributeError: the settings have no such section, or it has no setting of an option's
                name.
        """
        section = settings
        for name in self.section.split(".") if self.section else ():
            section = getattr(section, name)
        fields = msgspec.structs.fields(self.options)
        return self.build(
            self.options(**{field.name: getattr(section, field.name) for field in fields})
        )
