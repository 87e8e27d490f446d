"""How a metric is described: name, type, help, unit, labels, what counts it, and how the numbers of
several processes become one.

A metric is declared once, in the module that counts it: `counter`, `gauge` and `histogram` note it
here, so that whoever shows metrics knows all of them. A process has imported all modules that count
before it serves. A metric is counted in one of three ways: by an event (`of`), by
`Observers.count`, or by what `Observers.show` reads at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from operator import add, attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

E = TypeVar("E")
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values, each behind those of its labels."""
REMOVED = "removed"
"""The value of `node` for engines that are not in the pool any more."""
OTHER = "other"
"""The value of a label for all that have no value of their own."""


class MetricKind(Enum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MergeRule(Enum):
    """How several numbers become one."""

    SUM = "sum"
    MOST = "most"
    LEAST = "least"
    MEAN = "mean"

    @property
    def of_two(self) -> Callable[[float, float], float]:
        """What makes one number of two. A mean is their sum: it is divided once all are added."""
        return _OF_TWO[self]


_OF_TWO: Mapping[MergeRule, Callable[[float, float], float]] = MappingProxyType(
    {MergeRule.SUM: add, MergeRule.MEAN: add, MergeRule.MOST: max, MergeRule.LEAST: min}
)


@dataclass(frozen=True, slots=True)
class Label:
    """A label. `values`: all values with their meanings, if they are known in advance; else empty,
    and `text` says what it is.

    `most`: so many values, those that come first, are shown of what events count; all further ones
    are `OTHER` (`observe.label_values`). Labels of one name show the same. None: no bound.
    """

    name: str
    values: tuple[tuple[str, str], ...] = ()
    text: str = ""
    most: int | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """The values that are known in advance."""
        return tuple(value for value, _ in self.values)


@dataclass(frozen=True, slots=True)
class Of:
    """What an event counts: `found` returns label values, and what is added to their counter or
    observed by their histogram.
    """

    event: type[Any]
    found: Callable[[Any], Samples] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Description:
    """One metric. `name` as on the page (counters end in `_total`), `unit` of its values, `bounds`
    of a histogram's buckets.

    `together`: the combinations of label values that occur; None: all of them. `workers`: what
    becomes of the numbers of several processes, `pools`: of several pools of one process, where
    both have the same labels. `of`: the event that counts it, if any.
    """

    name: str
    kind: MetricKind
    text: str
    unit: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()
    together: tuple[tuple[str, ...], ...] | None = None
    workers: MergeRule = MergeRule.SUM
    pools: MergeRule = MergeRule.SUM
    of: Of | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels."""
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """The label values that are known in advance; empty if those of one label are not."""
        return (
            self.together
            if self.together is not None
            else tuple(product(*(label.known for label in self.labels)))
        )

    @property
    def is_of_nodes(self) -> bool:
        """Whether each series is of one engine: the first label is `NODE`."""
        return bool(self.labels) and self.labels[0] is NODE


NODE = Label("node", text="the engine's URL")
TASK = Label("task", text="the task's name")
"""A task of an engine has the engine's URL behind a blank."""
ROLE = Label("role", text="prefill, decode, aggregated or any")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds in seconds for phases of a request."""
_declared: dict[str, Description] = {}


def declared() -> tuple[Description, ...]:
    """Return all metrics of the modules that are imported, by name."""
    return tuple(one for _, one in sorted(_declared.items()))


def described(name: str) -> Description | None:
    """Return the metric of this name. None: no module that is imported declares one; another
    process may have imported more.
    """
    return _declared.get(name)


def counter(
    name: str,
    unit: str,
    text: str,
    *labels: Label,
    together: tuple[tuple[str, ...], ...] | None = None,
    workers: MergeRule = MergeRule.SUM,
    of: type[E] | None = None,
    by: str | None = None,
    counts: Callable[[E], Samples] | None = None,
) -> Description:
    """Declare a counter. `of`: the event that counts it: the labels are its fields of the same
    names, or what `counts` finds.

    `by`: the field whose value is added; None: 1. ValueError: the event lacks such a field, or the
    name is in use.
    """
    found = None if of is None else _of(of, labels, by, counts)
    return _noted(
        Description(name, MetricKind.COUNTER, text, unit, labels, (), together, workers, of=found)
    )


def gauge(
    name: str,
    unit: str,
    text: str,
    *labels: Label,
    workers: MergeRule,
    pools: MergeRule = MergeRule.SUM,
) -> Description:
    """Declare a gauge. ValueError: the name is in use."""
    return _noted(
        Description(name, MetricKind.GAUGE, text, unit, labels, workers=workers, pools=pools)
    )


def histogram(
    name: str,
    text: str,
    *labels: Label,
    bounds: tuple[float, ...] = SECONDS,
    of: type[E] | None = None,
    by: str | None = None,
    counts: Callable[[E], Samples] | None = None,
) -> Description:
    """Declare a histogram of seconds, with the upper `bounds` of its buckets; for the others see
    `counter`.
    """
    found = None if of is None else _of(of, labels, by, counts)
    return _noted(
        Description(name, MetricKind.HISTOGRAM, text, "seconds", labels, bounds, of=found)
    )


def _noted(one: Description) -> Description:
    if one.name in _declared:
        raise ValueError(f"there is a metric {one.name} already")
    _declared[one.name] = one
    return one


def _of(
    event: type[Any],
    labels: tuple[Label, ...],
    by: str | None,
    counts: Callable[[Any], Samples] | None,
) -> Of:
    if counts is not None:
        return Of(event, counts)
    names = [label.name for label in labels]
    for name in [*names, *([by] if by is not None else [])]:
        if name not in event.__struct_fields__:
            raise ValueError(f"{event.__name__} has no {name}")
    value: Callable[[Any], float] = (lambda _: 1) if by is None else attrgetter(by)
    if not names:
        return Of(event, lambda event: [((), value(event))])
    get: Callable[[Any], Any] = attrgetter(*names)
    if len(names) > 1:
        return Of(event, lambda event: [(get(event), value(event))])
    if by is None:  # each split request has such an event
        return Of(event, lambda event: [((get(event),), 1)])
    return Of(event, lambda event: [((get(event),), value(event))])
