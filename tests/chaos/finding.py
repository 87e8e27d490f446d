"""What a run has found: rules that do not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

_MANY = 5
"""Findings of one rule that are described."""


class Finding(msgspec.Struct, frozen=True):
    """A rule that does not hold."""

    rule: str
    text: str


def shortened(found: Sequence[Finding]) -> list[Finding]:
    """Return a few findings of each rule, and how many more there are."""
    counts = Counter(one.rule for one in found)
    shown: Counter[str] = Counter()
    kept = []
    for one in found:
        shown[one.rule] += 1
        if shown[one.rule] <= _MANY:
            kept.append(one)
    return [
        *kept,
        *(
            Finding(rule, f"... {count - _MANY} more")
            for rule, count in counts.items()
            if count > _MANY
        ),
    ]
