"""Whether an object is as it is wanted: nothing is written if it is.

The annotation with the hash of what was applied last says whether something else is wanted now.
The fields of the live object say whether somebody has changed, or taken away, what was applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from pdproxy_operator.names import APPLIED
from pdproxy_operator.own import OwnObject
from pdproxy_operator.resources import Object

_KEYS = ("name", "uid", "type", "containerPort", "port", "ip")
"""Fields by which lists of objects are merged."""
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "u": Decimal("1e-6"),
    "n": Decimal("1e-9"),
    **{unit: Decimal(1000) ** at for at, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** at for at, unit in enumerate("KMGTPE", 1)},
}
"""Suffixes of quantities."""
_OF_QUANTITIES = {"limits", "requests", "sizeLimit"}
"""Fields that have quantities: the server writes 1000m as 1."""


def stamped(wanted: Object) -> Object:
    """Return an object with the annotation that says what is applied."""
    encoded = msgspec.json.encode(wanted, order="deterministic")
    metadata = wanted["metadata"]
    annotations = {
        **metadata.get("annotations", {}),
        APPLIED: hashlib.sha256(encoded).hexdigest()[:32],
    }
    return {**wanted, "metadata": {**metadata, "annotations": annotations}}


def is_as_wanted(live: OwnObject, wanted: Object) -> bool:
    """Return whether an object has all fields of what is wanted, which is `stamped`. The server
    adds fields, and so may others.
    """
    fields = {name: value for name, value in wanted.items() if name not in ("apiVersion", "kind")}
    return _has(live.fields(), fields)


def _has(live: Any, wanted: Any, *, is_quantity: bool = False) -> bool:
    if isinstance(wanted, dict) and isinstance(live, dict):
        return all(
            _has(live[key], value, is_quantity=is_quantity or key in _OF_QUANTITIES)
            if key in live
            else _is_empty(value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list) and isinstance(live, list):
        return _has_items(live, wanted)
    if is_quantity:
        return bool(_quantity(live) == _quantity(wanted))
    return bool(live == wanted) or (_is_empty(live) and _is_empty(wanted))


def _has_items(live: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Return whether a list has all that is wanted. Items with names are merged by these, so that
    others may add some.
    """
    key = next((one for one in _KEYS if _all_have(wanted, one) and _all_have(live, one)), None)
    if key is None or len({_name(one, key) for one in wanted}) < len(wanted):
        return len(live) == len(wanted) and all(map(_has, live, wanted))
    known = {_name(one, key): one for one in live}
    return all(_has(known.get(_name(one, key)), one) for one in wanted)


def _all_have(items: Sequence[Any], key: str) -> bool:
    return all(isinstance(one, dict) and key in one for one in items)


def _name(item: Object, key: str) -> tuple[Any, ...]:
    return item[key], item.get("protocol", "TCP")


def _is_empty(value: Any) -> bool:
    """Return whether the server leaves such a field out."""
    return value is None or value is False or value in ("", 0, {}, [])


def _quantity(value: Any) -> Any:
    """Return a quantity as a number, or the value if it is none."""
    text = str(value)
    number = text.rstrip("KkMGTPEimun")
    try:
        return Decimal(number) * _UNITS[text[len(number) :]]
    except (InvalidOperation, KeyError):
        return value
