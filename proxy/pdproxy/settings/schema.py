"""The settings as one typed tree, so that all packages get values that are already checked.

The docstring below a field says what it means: `configs/reference.yaml` and the page of the
settings are made of these. `pdproxy.settings.load` fills the tree, `pdproxy.settings.crosscheck`
checks fields against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec

from pdproxy.settings.dns import Dns, ReplicaSettings
from pdproxy.settings.engines import EngineSettings
from pdproxy.settings.health import Continuations, Health, OutlierSettings, Probes
from pdproxy.settings.keys import Auth, TenantSettings
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.settings.kv import KvReady, RegistrationSettings
from pdproxy.settings.limits import Deadlines, Limits, MediaSettings, Overload, of_each
from pdproxy.settings.listen import Listen, Observe
from pdproxy.settings.pools import Pool
from pdproxy.settings.section import Section, WhileSame, fields_of
from pdproxy.settings.sources import SourceSection


class Settings(Section, frozen=True):
    """All settings."""

    listen: Listen = Listen()
    # Without keys, engines get clients' own headers: a mistake must not open the proxy, or the
    # engines.
    auth: Annotated[Auth, WhileSame("auth.wants_keys", "auth.wants_admin_keys")] = Auth()
    pools: tuple[Pool, ...] = ()
    """The engines, in pools: those of one pool work together. Each model goes to the pools that
    serve it.
    """

    media: MediaSettings = MediaSettings()
    engines: EngineSettings = EngineSettings()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    overload: Overload = Overload()
    tenants: TenantSettings = TenantSettings()
    health: Health = Health()
    outliers: OutlierSettings = OutlierSettings()
    continuations: Continuations = Continuations()
    kv_ready: KvReady = KvReady()
    registration: RegistrationSettings = RegistrationSettings()
    probes: Probes = Probes()
    dns: Dns = Dns()
    kubernetes: Kubernetes = Kubernetes()
    replicas: ReplicaSettings = ReplicaSettings()
    observe: Observe = Observe()

    @property
    def hides_operator_routes(self) -> bool:
        """Whether only operators see at the clients' port what is for them."""
        if self.listen.operator_routes == "auto":
            return self.auth.wants_keys or self.overload.tenant_header is not None
        return self.listen.operator_routes == "admin"

    @property
    def pool(self) -> Pool:
        """The first pool."""
        return self.pools[0]

    def of_pool(self, pool: Pool) -> Settings:
        """Return the settings for the parts of one pool, which is the only one in them."""
        if self.pools == (pool,) and pool.kv_ready_port is None and pool.registration_port is None:
            return self
        replace, kv_ready, registration = msgspec.structs.replace, self.kv_ready, self.registration
        if pool.kv_ready_port is not None:
            kv_ready = replace(kv_ready, port=pool.kv_ready_port)
        if pool.registration_port is not None:
            registration = replace(registration, port=pool.registration_port)
        return replace(self, pools=(pool,), kv_ready=kv_ready, registration=registration)


SOURCES: Mapping[str, type[SourceSection]] = MappingProxyType(
    {
        field.name: field.type
        for field in fields_of(Settings)
        if isinstance(field.type, type) and issubclass(field.type, SourceSection)
    }
)
"""The kinds of sources of engines, by the names of their sections."""
_BY_SCHEME = MappingProxyType(
    {scheme: name for name, section in SOURCES.items() for scheme in section.schemes}
)


def source_kind(url: str) -> str | None:
    """Return the name of the kind of source that a URL names, None if it names none: it may be an
    engine's own.
    """
    return _BY_SCHEME.get(url.partition("://")[0].lower())


def source_section(url: str) -> type[SourceSection] | None:
    """Return what the settings have of the source that a URL names, None if it names none."""
    kind = source_kind(url)
    return None if kind is None else SOURCES[kind]


def engine_scheme(url: str) -> str:
    """Return the scheme of the engines that a URL of a node is for: its own, or that of what its
    source finds.
    """
    scheme, section = url.partition("://")[0].lower(), source_section(url)
    return scheme if section is None else section.schemes[scheme]


def of_worker(settings: Settings, workers: int) -> Settings:
    """Return the settings of one of so many workers, whatever number these settings ask for: that
    needs a restart.
    """
    return msgspec.structs.replace(settings, limits=of_each(settings.limits, workers))
