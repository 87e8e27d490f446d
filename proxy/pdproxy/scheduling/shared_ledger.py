"""A ledger that chooses by the load of all workers: each has its own leases, and adds those of the others to each engine's load.

Owns this worker's column of the table of loads. Two workers that choose within the same microseconds may choose the same engine:
neither has seen the other's lease yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Node, NodeSpec, Role
from pdproxy.scheduling.policy import Ask

MEASURES = 2
"""Numbers of the table for each engine: requests, prompt bytes."""


class SharedLedger(Ledger):
    """A `Ledger` of one of several workers. `column` is its own part of the table of loads, `others` those of the others."""

    def __init__(self, specs: Iterable[NodeSpec], *, column: Column, others: Others, **options: Any) -> None:
        super().__init__([], **options)
        self._column = column
        self._others = others
        self._keys: dict[str, int] = {}
        """By the URL of each engine that is in the ledger, or has leases of this worker."""
        self._of_key: dict[int, Node] = {}
        self._own: dict[str, tuple[int, int]] = {}
        """This worker's own load of engines that have any."""
        for spec in specs:
            self.add(spec)

    def refresh(self, *, all_of_it: bool = False) -> None:
        """Take over what other workers have leased and given back. `all_of_it`: whether or not it seems to have changed."""
        changed = self._others.changed()
        if changed is None or all_of_it:
            for node in self._of_key.values():
                self._read(node)
        else:
            for one in [self._of_key[key] for key in changed if key in self._of_key]:
                self._read(one)

    def add(self, spec: NodeSpec) -> Node:
        """See `Ledger`."""
        node = super().add(spec)
        key = self._keys.get(spec.url)
        if key is None:
            key = self._keys[spec.url] = key_of(spec.url)
        self._of_key[key] = node
        self._read(node)
        return node

    def remove(self, url: str) -> None:
        """See `Ledger`. What is left of the engine's load is this worker's own."""
        node = self._nodes[url]
        super().remove(url)
        del self._of_key[self._keys[url]]
        self._put(node, 0, 0)
        if url not in self._own:
            self._column.drop(self._keys.pop(url))

    def assign(self, roles: Sequence[Role], ask: Ask, *, without: Collection[str] = ()) -> Assignment | None:
        """See `Ledger`."""
        self.refresh()
        return super().assign(roles, ask, without=without)

    def assign_alone(self, ask: Ask, *, without: Collection[str] = ()) -> Lease | None:
        """See `Ledger`."""
        self.refresh()
        return super().assign_alone(ask, without=without)

    def close(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None = None) -> bool:
        """See `Ledger`."""
        if not lease.closed:
            self._count(lease.node.url, -1, -lease.prompt_bytes)
        return super().close(lease, verdict, now, tokens)

    def _open(self, node: Node, role: Role, prompt_bytes: int, ask: Ask) -> Lease:
        self._count(node.url, 1, prompt_bytes)
        return super()._open(node, role, prompt_bytes, ask)

    def _count(self, url: str, requests: int, prompt_bytes: int) -> None:
        had = self._own.get(url, (0, 0))
        has = self._own[url] = had[0] + requests, had[1] + prompt_bytes
        key = self._keys[url]
        self._column.write(key, has)
        if not has[0]:
            del self._own[url]
            if key not in self._of_key:
                self._column.drop(self._keys.pop(url))

    def _read(self, node: Node) -> None:
        requests, prompt_bytes = self._others.sums(self._keys[node.url])
        if (requests, prompt_bytes) != node.elsewhere:
            self._put(node, requests, prompt_bytes)
            for policy in self._interested[node.uses]:
                policy.load_changed(node)

    @staticmethod
    def _put(node: Node, requests: int, prompt_bytes: int) -> None:
        """Have an engine's load hold so much of other workers'."""
        node.requests += requests - node.elsewhere[0]
        node.prompt_bytes += prompt_bytes - node.elsewhere[1]
        node.elsewhere = requests, prompt_bytes
