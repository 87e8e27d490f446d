"""The dashboards, each in a module that says which panels it has."""

from __future__ import annotations

from tests.reference.boards import decisions, engines, kv, overview, phases, replicas, tenants

BOARDS = (
    overview.BOARD,
    phases.BOARD,
    engines.BOARD,
    kv.BOARD,
    decisions.BOARD,
    tenants.BOARD,
    replicas.BOARD,
)
