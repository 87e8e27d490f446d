"""Trials on virtual engines, each kind once in a process: such engines always take the same
times.
"""

from __future__ import annotations

from typing import Any

from pdproxy_lab.calibrate.trials import Seen, Trial
from pdproxy_lab.calibrate.virtual import seen_of

_known: dict[tuple[Any, ...], Seen] = {}


def seen_once(trial: Trial, options: dict[str, Any], *, split: bool = False) -> Seen:
    """What `seen_of` returns."""
    key = (trial, tuple(sorted(options.items())), split)
    if key not in _known:
        _known[key] = seen_of(trial, options, split=split)
    return _known[key]
