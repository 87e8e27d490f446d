"""The breakers: an engine that failed too often in a row gets no requests for a time, then one, then more and more."""

from __future__ import annotations

from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.nodes import Node

TRIED = 1 << 10
"""Places of a slow start at which it is over, whatever time is left: so many requests at once are what any engine has."""


class Breakers:
    """After `failures` failed legs in a row, an engine's breaker is open for `cooldown` seconds.

        closed --failures in a row--> open --cooldown--> half-open --a good leg--> slow start --time--> closed
                                        ^                    |
                                        +----a failed leg----+

    Open: the engine is chosen only if there is no other. Half-open: it gets one request at a time, until one has shown data or
    ended well. Slow start: for `slow_start` seconds it has two places at first, and twice as many after each good leg; 0: none.
    Legs that were sent before the breaker opened may still end. While it is open, their failures neither open it again nor keep
    it open for longer, and a good one resets the count of failures without closing it. After the cooldown they count as all do.
    """

    def __init__(self, failures: int, cooldown: float, slow_start: float = 0.0) -> None:
        self.configure(failures, cooldown, slow_start)
        self.opened: set[Node] = set()
        """Engines whose breaker was opened and is not closed yet, also those that are half-open or start slowly."""

    def configure(self, failures: int, cooldown: float, slow_start: float) -> None:
        """Use these numbers from the next failure, or the next good leg, on."""
        self._failures, self._cooldown, self._slow_start = failures, cooldown, slow_start

    def leased(self, lease: Lease) -> None:
        """A request begins at one of the engines in `opened`, or at another one."""
        node = lease.node
        if node.trial_places:
            lease.trial = node.trial_number
            node.trials += 1

    def over(self, lease: Lease) -> None:
        """A leg that has the number of a trial is over."""
        if lease.trial == lease.node.trial_number:
            lease.node.trials -= 1

    def proved(self, lease: Lease, now: float) -> None:
        """The engine of a trial has shown data, or has ended the leg well. Calling it twice for a leg changes nothing."""
        node = lease.node
        if lease.proved or lease.trial != node.trial_number or now < node.open_until:
            return
        lease.proved = True
        self._tried(node, now)

    def good(self, lease: Lease, now: float) -> None:
        """A leg of an engine ended well."""
        node = lease.node
        node.failures = 0
        if lease.trial:
            self.proved(lease, now)
        elif now >= node.open_until:
            self._tried(node, now)

    def failed(self, lease: Lease, now: float) -> bool:
        """A leg of an engine failed. Return whether this opened its breaker.

        An engine that is down or stalled gets no requests anyway.
        """
        node = lease.node
        node.failures += 1
        if now < node.open_until or node.down_because is not None or node.stalled is not None:
            return False
        is_trial = lease.trial == node.trial_number and node.half_open(now)
        if node.failures < self._failures and not is_trial:
            return False
        self._half_open(node)
        node.open_until = now + self._cooldown
        node.excluded_because = None
        return True

    def exclude(self, node: Node, why: str, until: float) -> None:
        """Open an engine's breaker until a time, whatever its last legs have shown."""
        self._half_open(node)
        node.failures, node.open_until, node.excluded_because = 0, until, why

    def let_in(self, node: Node, now: float) -> None:
        """Let an engine show with one request that it serves again."""
        node.failures = 0
        self._half_open(node)
        node.open_until = now

    def warm_up(self, node: Node, now: float) -> None:
        """Begin the slow start of an engine that has no failures: its run is new. Without slow starts nothing changes."""
        if self._slow_start:
            self._half_open(node)
            node.trial_places, node.open_until, node.slow_until = 2, 0.0, now + self._slow_start

    def take_over(self, node: Node, before: Node) -> None:
        """Have an engine whose settings have changed be as far out of use as before. `before`: a copy of its node from then."""
        node.failures = before.failures
        if before.open_until or before.trial_places:
            self._half_open(node)
            node.open_until, node.excluded_because = before.open_until, before.excluded_because
            node.trial_places, node.slow_until = before.trial_places, before.slow_until

    def any_left(self, now: float) -> bool:
        """End the slow starts whose time is over. Return whether any engine is still in `opened`."""
        for node in [one for one in self.opened if one.slow_until and now >= one.slow_until]:
            self._close(node)
        return bool(self.opened)

    def reset(self, node: Node) -> None:
        """Forget an engine's failures."""
        node.failures = 0
        self._close(node)

    def _half_open(self, node: Node) -> None:
        """Have an engine get one request at a time, once its cooldown is over."""
        self.opened.add(node)
        node.trial_number += 1  # what began before is no trial any more
        node.trials, node.trial_places, node.slow_until = 0, 1, 0.0

    def _tried(self, node: Node, now: float) -> None:
        if node.trial_places and (not node.slow_until or now < node.slow_until):
            node.trial_places *= 2
            if not node.slow_until:
                node.open_until, node.slow_until = 0.0, now + self._slow_start
            if now < node.slow_until and node.trial_places < TRIED:
                return
        self._close(node)

    def _close(self, node: Node) -> None:
        node.open_until = node.slow_until = 0.0
        node.trials = node.trial_places = 0
        node.excluded_because = None
        self.opened.discard(node)
