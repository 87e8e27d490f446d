"""What is left of an engine in a proxy: a walk through all objects that the proxy refers to."""

from __future__ import annotations

import asyncio
import functools
import logging
import types
from collections.abc import Collection, Iterator
from typing import Any

from pdproxy.observe.recent import Recent
from pdproxy.scheduling.decisions import Decisions
from pdproxy.settings.schema import Settings
from tests.fakes.received import Connection

_ATOMS = (
    int,
    float,
    complex,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    asyncio.AbstractEventLoop,
)
_TESTS_OWN = (Connection,)
"""What the tests keep at each connection of a client."""
_HISTORY = (Settings, Decisions, Recent, logging.Logger)
"""What may name engines that are gone: the settings of the start, the last decisions, and the last
requests.
"""


def remains(root: object, names: Collection[str], skip: Collection[object] = ()) -> list[str]:
    """Return the places, as paths from `root`, of texts with one of these names. Objects in `skip`
    are not looked into.
    """
    found: list[str] = []
    seen = {id(one) for one in skip}
    stack: list[tuple[object, str]] = [(root, "proxy")]
    kept: list[object] = []  # an id is not given to another object meanwhile
    while stack:
        one, path = stack.pop()
        if isinstance(one, (str, bytes)):
            text = one.decode("latin-1") if isinstance(one, bytes) else one
            if any(name in text for name in names):
                found.append(f"{path} = {text[:80]}")
            continue
        if one is None or isinstance(one, _ATOMS + _HISTORY + _TESTS_OWN) or id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        stack += [(value, f"{path}{name}") for name, value in _parts(one)]
    return found


def _parts(one: Any) -> Iterator[tuple[str, object]]:
    if isinstance(one, dict) or (hasattr(one, "items") and hasattr(one, "keys")):
        for key, value in list(one.items()):
            yield "{key}", key
            yield f"[{str(key)[:40]}]", value
    elif isinstance(one, Collection) and not isinstance(one, (bytearray, memoryview, range)):
        for at, value in enumerate(list(one)):
            yield f"[{at}]", value
    if isinstance(one, types.MethodType):
        yield ".__self__", one.__self__
        yield ".__func__", one.__func__
    elif isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            try:
                yield f".{one.__qualname__}()", cell.cell_contents
            except ValueError:  # empty
                continue
    elif isinstance(one, functools.partial):
        yield ".func", one.func
        yield ".args", one.args
        yield ".keywords", one.keywords
    elif isinstance(one, asyncio.Task):
        yield ".task", one.get_name()
    for name, value in list(getattr(one, "__dict__", {}).items()):
        yield f".{name}", value
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = (
                f"_{kind.__name__.lstrip('_')}{name}"
                if name.startswith("__") and not name.endswith("__")
                else name
            )
            if private not in ("__dict__", "__weakref__") and hasattr(one, private):
                yield f".{private}", getattr(one, private)
