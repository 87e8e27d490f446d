"""Looks at all bodies that simulated engines of this process get, in whichever way a test made the
engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest


@contextmanager
def whole_bodies() -> Iterator[None]:
    """Fail at the end if an engine got a body that is no JSON, or empty `kv_transfer_params`,
    whatever the client got.
    """
    module = sys.modules.get("pdproxy_lab.sim.server")
    if module is None:  # no test of this process has engines so far
        yield
        return
    found: list[str] = []
    server = module.SimServer
    keep = server.got_defective

    def note(engine: object, defect: str) -> None:
        found.append(f"{engine.facts.role} engine {engine.url}: {defect}")  # type: ignore[attr-defined]
        keep(engine, defect)

    with patch.object(server, "got_defective", note):
        yield
    if found:
        pytest.fail("broken bodies:\n" + "\n".join(found), pytrace=False)
