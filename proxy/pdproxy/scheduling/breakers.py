"""The breakers: an engine that failed too often in a row gets no requests for a time."""

from __future__ import annotations

from pdproxy.scheduling.nodes import Node


class Breakers:
    """After `failures` failed legs in a row, an engine's breaker is open for `cooldown` seconds.

    While it is open, the engine is chosen only if there is no other. Legs that were sent before may still end then. Their
    failures neither open the breaker again nor keep it open for longer. A good one resets the count of failures, but does not
    close the breaker. After the cooldown a good leg closes it; without a reset of the count, one failure opens it again.
    """

    def __init__(self, failures: int, cooldown: float) -> None:
        self._failures = failures
        self._cooldown = cooldown
        self.opened: set[Node] = set()
        """Engines whose breaker was opened and not closed since, also those whose cooldown is over."""

    def good(self, node: Node, now: float) -> None:
        """A leg of an engine ended well."""
        node.failures = 0
        if now >= node.open_until:
            self._close(node)

    def failed(self, node: Node, now: float) -> bool:
        """A leg of an engine failed. Return whether this opened its breaker.

        An engine that is down gets no requests anyway, and starts with a closed breaker when it is up again.
        """
        node.failures += 1
        if node.failures < self._failures or now < node.open_until or node.down_because is not None:
            return False
        node.open_until = now + self._cooldown
        self.opened.add(node)
        return True

    def reset(self, node: Node) -> None:
        """Forget an engine's failures."""
        node.failures = 0
        self._close(node)

    def _close(self, node: Node) -> None:
        node.open_until = 0.0
        self.opened.discard(node)
