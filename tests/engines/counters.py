"""Prometheus text as numbers that a test can ask for and subtract."""

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
        """Read a /metrics page; comments are skipped."""
        found = (_LINE.match(line) for line in text.splitlines() if not line.startswith("#"))
        return cls([(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m])

    def sum(self, name: str, **labels: str) -> float:
        """The sum of `name` over all samples that carry these labels; 0 where there is none yet."""
        return sum(
            value
            for sample, have, value in self.samples
            if sample == name and all(have.get(key) == wanted for key, wanted in labels.items())
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of `name` for each value of `label`."""
        sums: dict[str, float] = {}
        for sample, have, value in self.samples:
            if sample == name and label in have:
                sums[have[label]] = sums.get(have[label], 0.0) + value
        return sums

    def has(self, name: str) -> bool:
        """Whether the page shows this metric at all (so that a zero is known to be a zero)."""
        return any(sample == name for sample, _, _ in self.samples)
