"""Counts of the demo's own traffic. Pure; only `traffic` writes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Tally:
    """Requests since the start. Each one is answered whole, fails with a reason, or is cut off at
    the end of the demo.
    """

    sent: int = 0
    whole: int = 0
    cut: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests by reason."""

    @property
    def failed(self) -> int:
        """How many failed."""
        return self.failures.total()

    def copy(self) -> Tally:
        """Return a copy."""
        return replace(self, failures=Counter(self.failures))
