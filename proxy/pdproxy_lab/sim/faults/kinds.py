"""All kinds of faults by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from pdproxy_lab.sim.faults import answers, connection, engine, notices, writing
from pdproxy_lab.sim.faults.kind import FaultKind

_FAMILIES = (connection.FAMILY, writing.FAMILY, answers.FAMILY, engine.FAMILY, notices.FAMILY)
KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in chain(*_FAMILIES)}
