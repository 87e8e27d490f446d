"""How a metric is described: its name, type, help, unit, labels and their values. Only data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import product


class Kind(Enum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label. `values`: all values with their meanings, if they are known in advance; else empty, and `text` says what it is."""

    name: str
    values: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @property
    def known(self) -> tuple[str, ...]:
        """The values that are known in advance."""
        return tuple(value for value, _ in self.values)


@dataclass(frozen=True, slots=True)
class Description:
    """One metric. `name` as on the page (counters end in `_total`), `unit` of its values, `bounds` of a histogram's buckets.

    `together`: the combinations of label values that occur; None: all of them.
    """

    name: str
    kind: Kind
    text: str
    unit: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()
    together: tuple[tuple[str, ...], ...] | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels."""
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """The label values that are known in advance; empty if those of one label are not."""
        return self.together if self.together is not None else tuple(product(*(label.known for label in self.labels)))


NODE = Label("node", text="the engine's URL")
