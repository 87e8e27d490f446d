"""The engines through which KV is released that nobody will read. No lease: a release is no load."""

from __future__ import annotations

from collections.abc import Mapping

from pdproxy.scheduling.breakers import Breakers
from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.eligibility import Eligibility
from pdproxy.scheduling.nodes import Node, Role
from pdproxy.scheduling.policy import Ask


class Releasing:
    """Chooses them. `nodes`: all engines by URL. Those that are being drained are used if there are no others."""

    def __init__(self, nodes: Mapping[str, Node], eligibility: Eligibility, breakers: Breakers) -> None:
        self._nodes = nodes
        self._eligibility = eligibility
        self._breakers = breakers

    def through(self, prefill: str, model: str | None, now: float, *, prefer_not: str | None = None) -> Node | None:
        """Return the decode engine through which a prefill engine's handle is released."""
        made_by = self._nodes.get(prefill)  # None: it was removed, and its labels are not known any more
        found = [
            [
                node
                for node in nodes
                if node.url != prefill
                and (node.spec.has_source(prefill) if made_by is None else node.spec.takes_from(made_by.spec))
            ]
            for nodes in self._ranked(Role.DECODE, model, now)
        ]
        ranked = next((nodes for nodes in found if nodes), [])
        others = [node for node in ranked if node.url != prefer_not]
        return next(iter(self._tried(others, now) or ranked), None)

    def readers_of(self, decode: Node, model: str | None, now: float) -> list[Node]:
        """Return the prefill engines that may pull KV of a decode engine, best first."""
        for nodes in self._ranked(Role.PREFILL, model, now):
            if found := [node for node in nodes if prefill_and_decode(node, decode) is None]:
                return self._tried(found, now)
        return []

    def _ranked(self, role: Role, model: str | None, now: float) -> tuple[list[Node], list[Node]]:
        """Return the engines of a role that may get requests, best first, and those that are being drained."""
        draining = [
            node
            for node in self._nodes.values()
            if node.draining is not None and node.up and role in node.uses and (model is None or node.serves(model))
        ]
        return self._eligibility.ranked(role, Ask(model, 0, now), ()), draining

    def _tried(self, nodes: list[Node], now: float) -> list[Node]:
        """Return the engines without half-open ones, if there are others: those get one request, and releases hold no lease."""
        if not self._breakers.opened:
            return nodes
        return [node for node in nodes if not node.half_open(now)] or nodes
