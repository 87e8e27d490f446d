"""The ledger: which engines exist, how they are, what each is doing, and who gets the next request.

Owns every `Node` and every open `Lease`. Choosing and leasing are one synchronous step, so that two requests can't both
see the same free engine. A lease is closed once, and that closing is the only place where a request's load and its
verdict on an engine (the breaker) are written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import Enum
from operator import attrgetter

import msgspec

from pdproxy.scheduling.nodes import Evidence, Node, NodeSpec, Role

_LOAD_BITS = 48
"""More than the lesser of two loads ever needs."""


class Verdict(Enum):
    """What one leg said about an engine's health."""

    GOOD = "good"
    NEUTRAL = "neutral"  # the client left, or was refused: nothing is known
    FAILED = "failed"
    UNREACHABLE = "unreachable"  # it refused the connection: nothing more is sent until a probe succeeds


class Lease(msgspec.Struct):
    """One leg's place on an engine. Close it with `Ledger.close`, once."""

    node: Node
    prompt_bytes: int
    closed: bool = False


class Pair(msgspec.Struct, frozen=True):
    """A prefill and a decode engine, both leased."""

    prefill: Lease
    decode: Lease


class _Group:
    """Engines that may serve the same requests, and their loads in the same order: kept up to date, since all requests look."""

    __slots__ = ("loads", "nodes")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.loads = [node.load for node in nodes]
        for at, node in enumerate(nodes):
            node.places.append((self.loads, at))


class Ledger:
    """All engines of one pool. `breaker_failures` in a row keep an engine out for `breaker_cooldown` seconds."""

    def __init__(self, specs: Iterable[NodeSpec], *, breaker_failures: int, breaker_cooldown: float) -> None:
        self._nodes = {spec.url: Node(spec) for spec in specs}
        self._past_runs: dict[str, int] = {}
        """How many runs were seen of engines that were removed."""
        self._breaker_failures = breaker_failures
        self._breaker_cooldown = breaker_cooldown
        self._turns = dict.fromkeys(Role, 0)
        self._tripped: set[str] = set()
        self._groups: dict[tuple[Role, str | None], _Group] = {}
        self._whole: list[Role] = []
        """The roles that serve a request by themselves and have an engine that is up, the first choice first."""
        self._alike: dict[tuple[str, str], bool] = {}
        self._block_size: int | None = None
        self._template_tokens = 0

    def __repr__(self) -> str:
        busy = ", ".join(f"{n.role.value} {n.url} {n.down_because or 'up'} x{n.requests}" for n in self._nodes.values())
        return f"<Ledger {busy}>"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All engines, in the order of the settings. Read only."""
        return tuple(self._nodes.values())

    # -- what probes and audits report

    def saw(self, url: str, evidence: Evidence) -> bool:
        """Note that an engine answered its probe. Return whether it is new: first seen, restarted or changed."""
        node = self._nodes[url]
        new = node.evidence != evidence or node.down_because is not None
        if node.evidence is not None and node.evidence != evidence:
            self._forgive(node)
        if node.evidence is None or not node.evidence.same_run(evidence, was_down=node.down_because is not None):
            node.runs += 1
        if node.down_because is not None:
            node.failures, node.closed_until = 0, 0.0
        node.evidence, node.down_because, node.probed = evidence, None, True
        if new:
            self._changed()
        return new

    def lost(self, url: str, reason: str, now: float) -> bool:
        """Note that an engine can't serve. Return whether it could before."""
        if (node := self._nodes.get(url)) is None:
            return False  # it was removed
        was_up = node.down_because is None
        if was_up or not node.probed:
            node.down_since = now
        node.down_because, node.probed = reason, True
        self._changed()
        return was_up

    def eject(self, prefill: str, decode: str) -> None:
        """Never pair these two again, until one of them changes."""
        if prefill not in self._nodes or decode not in self._nodes:
            return  # it was removed
        self._nodes[prefill].ejected.add(decode)
        self._nodes[decode].ejected.add(prefill)
        self._changed()

    def _forgive(self, node: Node) -> None:
        for url in node.ejected:
            self._nodes[url].ejected.discard(node.url)
        node.ejected.clear()

    def life(self, url: str) -> tuple[str, int]:
        """Return what identifies one run of an engine: its url, and how many runs of it were seen so far."""
        node = self._nodes.get(url)
        return url, self._past_runs[url] if node is None else node.runs

    def add(self, spec: NodeSpec) -> Node:
        """Take in an engine. Nothing is sent to it before it has answered a probe."""
        # One that was here before may be another one now: what was learned of its runs must not count for it.
        node = self._nodes[spec.url] = Node(spec, runs=self._past_runs.pop(spec.url, -1) + 1)
        self._changed()
        return node

    def remove(self, url: str) -> None:
        """Take an engine out: nobody gets a lease on it any more. Open leases are closed as ever, without effect on others."""
        node = self._nodes.pop(url)
        self._past_runs[url] = node.runs
        self._forgive(node)
        node.closed_until = math.inf  # so that no leg that is under way opens or closes its breaker
        node.places.clear()
        self._changed()

    # -- what a request asks

    def block_size(self) -> int | None:
        """Return the smallest KV block of any engine in tokens, None while unknown."""
        return self._block_size

    def template_tokens(self) -> int:
        """Return how many tokens a chat template adds to a message at the most."""
        return self._template_tokens

    def pair(self, model: str | None, prompt_bytes: int, now: float, *, without: Collection[str] = ()) -> Pair | None:
        """Lease the least loaded pair of like engines that serves `model`, None if there is none.

        Prefill by outstanding prompt bytes, decode by requests in flight; ties go round.
        """
        if not without and not self._tripped:
            best = self._least(Role.PREFILL, model), self._least(Role.DECODE, model)
            if best[0] is not None and best[1] is not None and self._may_pair(best[0], best[1]):
                return Pair(self._lease(best[0], prompt_bytes), self._lease(best[1], 0))
        prefills = self._ranked(Role.PREFILL, model, now, without)
        decodes = self._ranked(Role.DECODE, model, now, without)
        for prefill in prefills:
            for decode in decodes:
                if self.unlike(prefill, decode) is None:
                    return Pair(self._lease(prefill, prompt_bytes), self._lease(decode, 0))
        return None

    def alone(self, model: str | None, prompt_bytes: int, now: float, *, without: Collection[str] = ()) -> Lease | None:
        """Lease the least loaded engine that can serve `model` by itself: aggregated ones first, then decode."""
        if not without and not self._tripped:
            groups = [(role, self._group(role, model)) for role in self._whole]
            if groups and all(group is not None for _, group in groups):
                sound = [self._next(role, group) for role, group in groups if group is not None]
                return self._lease(sound[0], prompt_bytes)
        best = [n for role in (Role.AGGREGATED, Role.DECODE) for n in self._ranked(role, model, now, without)[:1]]
        if not best:
            return None
        # One that serves the model before one that doesn't, a sound one before one that its breaker has shut out.
        best.sort(key=lambda n: (model is not None and not n.serves(model), not n.usable(now)))
        return self._lease(best[0], prompt_bytes)

    def releaser(self, prefill: str, model: str | None, now: float, *, prefer_not: str | None = None) -> Node | None:
        """Return the decode engine to give a handle of a prefill engine back through, not leased: a release is no load."""
        source = next((node.spec for node in self.nodes if node.url == prefill), None)
        ranked = [
            node for node in self._ranked(Role.DECODE, model, now, ()) if source is None or node.spec.takes_from(source)
        ]
        others = [node for node in ranked if node.url != prefer_not]
        return next(iter(others or ranked), None)

    def close(self, lease: Lease, verdict: Verdict, now: float) -> bool:
        """End a lease. Closing twice changes nothing. Return whether the engine was just shut out by its breaker."""
        if lease.closed:
            return False
        lease.closed = True
        node = lease.node
        self._load(node, -1, -lease.prompt_bytes)
        if verdict is Verdict.GOOD:
            node.failures = 0
            if self._tripped and now >= node.closed_until:
                node.closed_until = 0.0
                self._tripped.discard(node.url)
        elif verdict is Verdict.UNREACHABLE:
            return self.lost(node.url, "connection refused", now)
        elif verdict is Verdict.FAILED:
            node.failures += 1
            if node.failures >= self._breaker_failures and now >= node.closed_until:
                node.closed_until = now + self._breaker_cooldown
                self._tripped.add(node.url)
                return True
        return False

    def unlike(self, prefill: Node, decode: Node) -> str | None:
        """Return why two engines may not be paired, None if they may."""
        if not decode.spec.takes_from(prefill.spec):
            return "not configured as a pair"
        if prefill.evidence is None or decode.evidence is None:
            return "not probed yet"
        if decode.url in prefill.ejected:
            return "ejected: they counted different prompt lengths for one request"
        return prefill.evidence.difference(decode.evidence)

    def _ranked(self, role: Role, model: str | None, now: float, without: Collection[str]) -> list[Node]:
        """Return usable engines of a role, least loaded first. An unknown model matches any, for the engine's own 404."""
        alive = [n for n in self._nodes.values() if n.role is role and n.url not in without and n.alive]
        # A breaker makes room for others. Where there are none, a shut-out engine is better than no answer.
        serving = [n for n in alive if model is None or n.serves(model)]
        fitting = serving or (alive if role is not Role.PREFILL else [])
        candidates = [n for n in fitting if n.usable(now)] or fitting
        if len(candidates) > 1:
            self._turns[role] += 1
            turn = self._turns[role] % len(candidates)
            candidates = candidates[turn:] + candidates[:turn]
            candidates.sort(key=_load)
        return candidates

    def _least(self, role: Role, model: str | None) -> Node | None:
        """Return the least loaded engine of a role, as `_ranked` would where no engine is left out; None: ask that."""
        group = self._group(role, model)
        return None if group is None else self._next(role, group)

    def _next(self, role: Role, group: _Group) -> Node:
        """Return the least loaded of a group; ties go round. Every request asks: two passes over integers, in C."""
        nodes, loads = group.nodes, group.loads
        if len(nodes) == 1:
            return nodes[0]
        self._turns[role] += 1
        turn = self._turns[role] % len(nodes)
        least = min(loads)
        if loads[turn] == least:
            return nodes[turn]
        try:
            return nodes[loads.index(least, turn)]
        except ValueError:
            return nodes[loads.index(least)]

    def _group(self, role: Role, model: str | None) -> _Group | None:
        """Return the engines of a role that are up and serve a model, None if there are none."""
        group = self._groups.get((role, model))
        if group is None:
            nodes = [
                n for n in self._nodes.values() if n.role is role and n.alive and (model is None or n.serves(model))
            ]
            if not nodes:
                return None  # nor kept: models are words of clients
            # Adapters by the hundred are mostly served by the same engines, and a load is written down in every group.
            same = (one for one in self._groups.values() if one.nodes == nodes)
            group = self._groups[role, model] = next(same, None) or _Group(nodes)
        return group

    def _may_pair(self, prefill: Node, decode: Node) -> bool:
        key = prefill.url, decode.url
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = self.unlike(prefill, decode) is None
        return alike

    def _changed(self) -> None:
        """Forget what was worked out from how the engines are."""
        self._groups.clear()
        for node in self._nodes.values():
            node.places.clear()
        self._alike.clear()
        self._whole = [
            r for r in (Role.AGGREGATED, Role.DECODE) if any(n.role is r and n.alive for n in self._nodes.values())
        ]
        known = [n.evidence for n in self._nodes.values() if n.evidence is not None]
        self._block_size = min((one.block_size for one in known if one.block_size), default=None)
        self._template_tokens = max((one.template_tokens for one in known), default=0)
        self._tripped = {n.url for n in self._nodes.values() if n.closed_until}

    def _lease(self, node: Node, prompt_bytes: int) -> Lease:
        self._load(node, 1, prompt_bytes)
        return Lease(node, prompt_bytes)

    @staticmethod
    def _load(node: Node, requests: int, prompt_bytes: int) -> None:
        node.requests += requests
        node.prompt_bytes += prompt_bytes
        most, least = (
            (node.prompt_bytes, node.requests) if node.role is Role.PREFILL else (node.requests, node.prompt_bytes)
        )
        node.load = (most << _LOAD_BITS) + least
        for loads, at in node.places:
            loads[at] = node.load

    # -- what an operator asks

    def not_ready(self) -> str | None:
        """Return why no request could be served, None if one could."""
        waiting = [n.url for n in self._nodes.values() if not n.probed]
        if waiting:
            return f"starting: not probed yet: {', '.join(waiting)}"
        if not any(n.role is not Role.PREFILL and n.alive for n in self._nodes.values()):
            return "no decode or aggregated engine is up: " + "; ".join(
                f"{n.url} {n.down_because}" for n in self._nodes.values() if n.role is not Role.PREFILL
            )
        return None

    def shortcomings(self, now: float) -> list[str]:
        """Return what is wrong although requests are served, a sentence each."""
        found = [f"{n.role.value} {n.url}: {n.down_because}" for n in self._nodes.values() if n.down_because]
        found += [
            f"{n.role.value} {n.url}: failed {n.failures} times in a row, shut out for {n.closed_until - now:.1f} s"
            for n in self._nodes.values()
            if n.down_because is None and now < n.closed_until
        ]
        up = [n for n in self._nodes.values() if n.down_because is None]
        for prefill in (n for n in up if n.role is Role.PREFILL):
            for decode in (n for n in up if n.role is Role.DECODE):
                if not decode.spec.takes_from(prefill.spec):
                    continue  # as wanted
                if (why := self.unlike(prefill, decode)) is not None:
                    found.append(f"{prefill.url} and {decode.url} are not paired: {why}")
        return found


_load = attrgetter("load")
