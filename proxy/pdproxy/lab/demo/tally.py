"""What the demo's own traffic has come to. Pure; one writer, `traffic`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Tally:
    """Requests since the start. Each that was sent ends whole, or failed with a reason, or cut off by our own end."""

    sent: int = 0
    whole: int = 0
    cut: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests by reason, a few words each."""

    @property
    def failed(self) -> int:
        """How many failed."""
        return self.failures.total()

    def copy(self) -> Tally:
        """Return the tally of this moment."""
        return replace(self, failures=Counter(self.failures))
