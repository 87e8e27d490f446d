"""What watches a pool's engines: the parts that `app.health` makes."""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.app.capacity import Scraped
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.health_canary import HealthCanary
from pdproxy.fleet.prober import Prober
from pdproxy.fleet.stalls import Stalls
from pdproxy.scheduling.outliers import Outliers


@dataclass(slots=True, kw_only=True)
class Probing:
    """What finds out how engines are, in the process that chooses them."""

    scraped: Scraped
    prober: Prober
    stalls: Stalls
    exclusions: Exclusions

    def start(self) -> None:
        """Begin to ask engines, and to compare them."""
        self.prober.start()
        self.stalls.start()
        self.exclusions.start()


@dataclass(slots=True, kw_only=True)
class Watching:
    """What watches the engines of a pool. `probing`: None in a process that does not choose
    engines.
    """

    auditor: Auditor
    canary: HealthCanary
    outliers: Outliers
    probing: Probing | None

    def start(self) -> None:
        """Begin to watch."""
        if self.probing is not None:
            self.probing.start()
