"""Which values of a label are shown, where clients or engines choose them: the first ones, up to
the number that the label allows. Without a bound they would make series without end.

A value is never taken back: what was counted for it, or for all others together, never decreases.
"""

from __future__ import annotations

from pdproxy.observe.description import OTHER, Label

MAX_LABEL = 256
"""Characters of such a value. A longer one is not shown."""


class LabelValues:
    """The values that one process shows."""

    def __init__(self) -> None:
        self._shown: dict[str, set[str]] = {}
        """By the names of their labels."""

    def __repr__(self) -> str:
        return f"<LabelValues: { ({name: len(values) for name, values in self._shown.items()}) }>"

    def has(self, label: Label, value: str) -> bool:
        """Return whether a value is shown already."""
        return value in self._shown.get(label.name, ())

    def shown(self, label: Label, value: str) -> str:
        """Return what a value is counted as: itself, or `OTHER` where there are too many. `label`:
        one that has a bound.
        """
        assert label.most is not None
        values = self._shown.setdefault(label.name, set())
        if value in values:
            return value
        if len(values) < label.most and len(value) <= MAX_LABEL:
            self._add(label.name, label.most, value)
        return value if value in values else OTHER

    def _add(self, name: str, most: int, value: str) -> None:
        """Show a value of a label that shows fewer than so many, if no other process was faster."""
        values = self._shown.setdefault(name, set())
        if len(values) < most:
            values.add(value)
