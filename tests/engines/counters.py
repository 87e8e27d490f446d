"""Reads Prometheus text into numbers."""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Counters:
    """All samples of one scrape: name, labels, value."""

    samples: list[tuple[str, dict[str, str], float]]

    @classmethod
    def parse(cls, text: str) -> "Counters":
        """Parse a /metrics page; comments are skipped."""
        found = (_LINE.match(line) for line in text.splitlines() if not line.startswith("#"))
        return cls([(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m])

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of `name` over all samples with these labels; 0 if there are none yet."""
        return sum(
            value
            for sample, have, value in self.samples
            if sample == name and all(have.get(key) == wanted for key, wanted in labels.items())
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sum of `name` for each value of `label`, without those that are 0: pdproxy's
        counters begin with 0.
        """
        sums: dict[str, float] = {}
        for sample, have, value in self.samples:
            if sample == name and label in have:
                sums[have[label]] = sums.get(have[label], 0.0) + value
        return {value: total for value, total in sums.items() if total}

    def has(self, name: str) -> bool:
        """Return whether the page has this metric, so that 0 means a real zero."""
        return any(sample == name for sample, _, _ in self.samples)
