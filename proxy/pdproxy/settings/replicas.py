"""The section `replicas`: how many proxies there are in front of the same engines.

Owns bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdproxy.scheduling.replicas import MAX_REPLICAS
from pdproxy.settings.dns import dns_name
from pdproxy.settings.errors import Mistakes, SettingsError, quote
from pdproxy.settings.section import Section, Text

AUTO: Literal["auto"] = "auto"
Replicas = Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] | Literal["auto"]


class ReplicaSettings(Section, frozen=True):
    """Other proxies in front of the same engines. They share nothing: each estimates what the others have at each engine."""

    count: Replicas = 1
    """How many proxies there are, with this one. auto: as many as the name below has addresses."""

    name: Text | None = None
    """The name in DNS that has an address for each of them: on Kubernetes that of a headless service, such as
    pdproxy-replicas.default.svc.cluster.local. null: none."""

    @property
    def several(self) -> bool:
        """Whether there are others, or may be."""
        return self.count != 1

    @property
    def at_first(self) -> int:
        """How many there are taken to be before DNS has answered."""
        return 1 if isinstance(self.count, str) else self.count


def check_replicas(replicas: ReplicaSettings, found: Mistakes) -> None:
    """Check that a name is there where it is needed, and could be one. Mistakes are added to `found`."""
    where = found.source(("replicas", "name"))
    if replicas.count == AUTO and replicas.name is None:
        found.add(
            ("replicas",), f"replicas.count = auto needs replicas.name, a name in DNS with their addresses{where}"
        )
    elif replicas.name is not None and replicas.count != AUTO:
        found.add(("replicas",), f"replicas.name has no effect without replicas.count = auto{where}")
    elif replicas.name is not None:
        try:
            dns_name(f"dns://{replicas.name}:1", ("replicas", "name"))
        except SettingsError:
            found.add(("replicas", "name"), f"replicas.name: {quote(replicas.name)}: no name in DNS can be so{where}")
