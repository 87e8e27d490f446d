"""The policy `round_robin`: engines take turns, whatever their load."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.scheduling.nodes import Node
from pdproxy.scheduling.policy import Ask, Best, Policy


class RoundRobin(Policy):
    """Each choice takes the engine after the one before, in the order of the settings.

    Engines that may not serve a request are left out of its turn, and don't get it later.
    """

    def __init__(self) -> None:
        self._turn = -1

    def rank(self, ask: Ask, nodes: Sequence[Node]) -> list[Node]:
        """See `Policy`."""
        self._turn += 1
        turn = self._turn % len(nodes)
        return [*nodes[turn:], *nodes[:turn]]

    def best_of(self, nodes: Sequence[Node]) -> Best:
        """See `Policy`."""
        count = len(nodes)

        def best(ask: Ask) -> Node:
            self._turn += 1
            return nodes[self._turn % count]

        return best
