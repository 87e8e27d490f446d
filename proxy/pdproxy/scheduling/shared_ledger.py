"""A ledger that chooses by the load of all workers: each has its own leases, and adds those of the others to each engine's load.

Owns this worker's column of the table of loads. What a worker notes of an engine's health it tells, so that all can note it
(`fleet.findings`). The table shows a lease at once, and reads those of the others when it chooses, but not
again within `READ_EVERY`: two workers that choose within this time may choose the same engine. A request lasts a thousand times
as long, so an engine gets few requests too many.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from pdproxy.kit import shared_sums
from pdproxy.kit.shared_sums import Add, OtherSums, adder
from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Evidence, Node, NodeSpec, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.shared_breakers import SharedBreakers

MEASURES = shared_sums.MEASURES
"""Numbers of the table for each engine: requests, prompt bytes."""
READ_EVERY = 0.001
"""Seconds. A worker with much to do begins several requests within them."""


# For each request: a method of the base class as a function of this module takes half the time of `super()`.
_assign, _open, _close = Ledger.assign, Ledger._open, Ledger.close  # noqa: SLF001


class SharedLedger(Ledger):
    """A `Ledger` of one of several workers. `column` is its own part of the table of loads, `others` those of the others.

    `breakers`: makes its breakers. `tell`: called with an engine's URL when something of its health was noted here.
    """

    def __init__(
        self,
        specs: Iterable[NodeSpec],
        *,
        column: Column,
        others: Others,
        breakers: Callable[[int, float, float], SharedBreakers],
        **options: Any,
    ) -> None:
        super().__init__([], breakers=breakers, **options)
        self.breakers: SharedBreakers
        self.tell: Callable[[str], None] = lambda _: None
        self.breakers.tell = partial(shared_sums.note, column)
        self._column = column
        self._others = OtherSums(others, self._moved)
        self._read_at = -math.inf
        """When it last read for a choice, in the time of requests."""
        self._own: dict[str, Add] = {}
        """What adds to this worker's load, by the URL of each engine that is in the ledger, or has leases of this worker."""
        for spec in specs:
            self.add(spec)

    def refresh(self, *, all_of_it: bool = False) -> None:
        """Take over what other workers have leased and given back. `all_of_it`: whether or not it seems to have changed."""
        others = self._others
        others.look(all_of_it=all_of_it)
        if others.noted:
            others.noted = False
            self.breakers.look(all_of_it=all_of_it)

    def add(self, spec: NodeSpec) -> Node:
        """See `Ledger`."""
        node = super().add(spec)
        self.breakers.add(node)
        key = key_of(spec.url)
        if spec.url not in self._own:
            self._own[spec.url] = adder(self._column, key)
        self.refresh()
        self._others.follow(key, node)
        return node

    def remove(self, url: str) -> None:
        """See `Ledger`. What is left of the engine's load is this worker's own."""
        node = self._nodes[url]
        self.breakers.drop(node)  # the others remove it by themselves
        super().remove(url)
        self._others.follow(key_of(url), None)
        self._moved(node, -node.of_workers[0], -node.of_workers[1])
        if not self._own[url](0, 0):
            self._forget(url)

    # -- what is noted of an engine's health

    @contextlib.contextmanager
    def following(self, node: Node) -> Iterator[None]:
        """Note what another worker has found of an engine: its breaker is as that worker has made it, and nobody is told."""
        tell, self.tell = self.tell, lambda _: None
        self.breakers.follows = True
        try:
            self.breakers.read(node)
            yield
        finally:
            self.tell, self.breakers.follows = tell, False

    def mark_up(self, url: str, evidence: Evidence) -> bool:
        """See `Ledger`."""
        if new := super().mark_up(url, evidence):
            self.tell(url)
        return new

    def mark_down(self, url: str, reason: str, now: float) -> bool:
        """See `Ledger`."""
        node = self._nodes.get(url)
        before = None if node is None else (node.probed, node.down_because)
        was_up = super().mark_down(url, reason, now)
        if node is not None and before != (node.probed, node.down_because):
            self.tell(url)
        return was_up

    def mark_stalled(self, url: str, why: str) -> bool:
        """See `Ledger`."""
        if new := super().mark_stalled(url, why):
            self.tell(url)
        return new

    def let_in(self, url: str, now: float) -> bool:
        """See `Ledger`."""
        if new := super().let_in(url, now):
            self.tell(url)
        return new

    def exclude(self, url: str, why: str, until: float, now: float) -> bool:
        """See `Ledger`."""
        if new := super().exclude(url, why, until, now):
            self.tell(url)
        return new

    def eject(self, prefill: str, decode: str) -> None:
        """See `Ledger`."""
        super().eject(prefill, decode)
        self.tell(decode)

    # -- what a request asks

    def assign(self, roles: Sequence[Role], ask: Ask, *, without: Collection[str] = ()) -> Assignment | None:
        """See `Ledger`."""
        if ask.now - self._read_at >= READ_EVERY:
            self._read_at = ask.now
            self.refresh()
        return _assign(self, roles, ask, without=without)

    def assign_alone(self, ask: Ask, *, without: Collection[str] = ()) -> Lease | None:
        """See `Ledger`."""
        self._look(ask)
        return super().assign_alone(ask, without=without)

    def place(
        self, ask: Ask, *, split: bool, without: Collection[str] = (), avoid: Collection[str] = ()
    ) -> Assignment | None:
        """See `Ledger`."""
        self._look(ask)
        return super().place(ask, split=split, without=without, avoid=avoid)

    def close(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None = None) -> bool:
        """See `Ledger`."""
        if not lease.closed:
            url = lease.node.url
            if not self._own[url](-1, -lease.prompt_bytes) and url not in self._nodes:
                self._forget(url)
        return _close(self, lease, verdict, now, tokens)

    def _open(self, node: Node, role: Role, prompt_bytes: int, ask: Ask) -> Lease:
        self._own[node.url](1, prompt_bytes)
        return _open(self, node, role, prompt_bytes, ask)

    def _look(self, ask: Ask) -> None:
        if ask.now - self._read_at >= READ_EVERY:
            self._read_at = ask.now
            self.refresh()

    def _forget(self, url: str) -> None:
        """Forget an engine that is neither in the ledger nor has leases."""
        self._column.drop(key_of(url))
        del self._own[url]

    def _moved(self, node: Node, more: int, more_bytes: int) -> None:
        """Have an engine's load hold so much more of other workers'."""
        node.requests += more
        node.prompt_bytes += more_bytes
        requests, prompt_bytes = node.of_workers
        node.of_workers = node.elsewhere = requests + more, prompt_bytes + more_bytes
        for policy in self._interested[node.uses]:
            policy.load_changed(node)
