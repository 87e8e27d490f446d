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
from typing import Any

from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Evidence, Node, NodeSpec, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.shared_breakers import SharedBreakers

MEASURES = 2
"""Numbers of the table for each engine: requests, prompt bytes."""
READ_EVERY = 0.001
"""Seconds. A worker with much to do begins several requests within them."""


class _Own:
    """This worker's own load of one engine, and the engine's key in the table."""

    __slots__ = ("key", "prompt_bytes", "requests")

    def __init__(self, key: int) -> None:
        self.key = key
        self.requests = self.prompt_bytes = 0


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
        self._column = column
        self._others = others
        self._read_at = -math.inf
        """When it last read for a choice, in the time of requests."""
        self._own: dict[str, _Own] = {}
        """By the URL of each engine that is in the ledger, or has leases of this worker."""
        self._of_key: dict[int, Node] = {}
        for spec in specs:
            self.add(spec)

    def refresh(self, *, all_of_it: bool = False) -> None:
        """Take over what other workers have leased and given back. `all_of_it`: whether or not it seems to have changed."""
        changed: Collection[int] | None = None if all_of_it else self._others.changed(len(self._of_key))
        for key in self._of_key if changed is None else changed:
            node = self._of_key.get(key)
            if node is not None:  # it may be known to others only
                self._read(key, node)
        self.breakers.look(all_of_it=all_of_it)

    def add(self, spec: NodeSpec) -> Node:
        """See `Ledger`."""
        node = super().add(spec)
        self.breakers.add(node)
        own = self._own.get(spec.url)
        if own is None:
            own = self._own[spec.url] = _Own(key_of(spec.url))
        self._of_key[own.key] = node
        self._read(own.key, node)
        return node

    def remove(self, url: str) -> None:
        """See `Ledger`. What is left of the engine's load is this worker's own."""
        node, own = self._nodes[url], self._own[url]
        self.breakers.drop(node)  # the others remove it by themselves
        super().remove(url)
        del self._of_key[own.key]
        self._put(node, (0, 0))
        if not own.requests:
            self._forget(url, own)

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
        self._look(ask)
        return super().assign(roles, ask, without=without)

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
            own = self._own[url]
            own.requests -= 1
            own.prompt_bytes -= lease.prompt_bytes
            if own.requests or own.key in self._of_key:
                self._column.write(own.key, (own.requests, own.prompt_bytes))
            else:
                self._forget(url, own)
        return super().close(lease, verdict, now, tokens)

    def _open(self, node: Node, role: Role, prompt_bytes: int, ask: Ask) -> Lease:
        own = self._own[node.url]
        own.requests += 1
        own.prompt_bytes += prompt_bytes
        self._column.write(own.key, (own.requests, own.prompt_bytes))
        return super()._open(node, role, prompt_bytes, ask)

    def _look(self, ask: Ask) -> None:
        if ask.now - self._read_at >= READ_EVERY:
            self._read_at = ask.now
            self.refresh()

    def _forget(self, url: str, own: _Own) -> None:
        """Forget an engine that is neither in the ledger nor has leases."""
        self._column.drop(own.key)
        del self._own[url]

    def _read(self, key: int, node: Node) -> None:
        sums = self._others.sums(key)
        if sums != node.of_workers:
            self._put(node, sums)
            for policy in self._interested[node.uses]:
                policy.load_changed(node)

    def _put(self, node: Node, of_workers: tuple[int, ...]) -> None:
        """Have an engine's load hold so much of other workers'."""
        (requests, prompt_bytes), (had_requests, had_bytes) = of_workers, node.of_workers
        more, more_bytes = requests - had_requests, prompt_bytes - had_bytes
        node.requests += more
        node.prompt_bytes += more_bytes
        node.of_workers = requests, prompt_bytes
        node.elsewhere = node.elsewhere[0] + more, node.elsewhere[1] + more_bytes
