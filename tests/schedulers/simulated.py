"""Have a connector of the simulator follow a script. It is called as the simulator's core calls it.

All engines that requests name have been met, as handshakes are the worker's part of a real
connector.
"""

from __future__ import annotations

import random
from typing import Any

from pdproxy_lab.sim.active import ActiveRequest, RequestState
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import Attention, BlockPool
from pdproxy_lab.sim.nixl import Greeting, Handshake, Nixl
from pdproxy_lab.sim.request import EngineDeadError, EngineRequest, SamplingParams
from pdproxy_lab.sim.stats import Stats
from tests.schedulers.scripts import BLOCK, Script, Step


class Simulated:
    """A connector, and the requests of one script. Subclasses make it and say what its commands are
    called.
    """

    def __init__(self, facts: SimFacts) -> None:
        self.facts = facts
        self.pool = BlockPool(8192, BLOCK)
        self.pool.take(8191)  # a script says which blocks a request has
        self.connector = self.made(facts)
        self._requests: dict[str, ActiveRequest] = {}

    def made(self, facts: SimFacts) -> Nixl:
        """Make the connector."""
        raise NotImplementedError

    def meet(self, params: dict[str, Any]) -> None:
        """Have met the engine that a request names."""

    def unblock(self, one: ActiveRequest) -> None:
        """End what the whole engine waits for."""

    def asked(self, command: Any) -> list[Any]:
        """Say what a command asks another engine for, as `Comparison.asked` does."""
        raise NotImplementedError

    def state(self, now: float) -> dict[str, Any]:
        """Say what else is to be compared after a step."""
        return {
            "leases": {name: round(left, 3) for name, left in self.connector.leases(now).items()}
        }

    def follow(self, script: Script) -> list[dict[str, Any]]:
        """Follow one script to its end or to the first death."""
        seen = []
        for step in script:
            try:
                found = getattr(self, step["do"])(step)
                if step["do"] != "new":
                    found |= {"asks": self._asks(step["now"])} | self.state(step["now"])
                seen.append(found)
            except EngineDeadError:
                seen.append({"died": True})
                break
        return seen

    def new(self, step: Step) -> dict[str, Any]:
        """Queue a request."""
        params = step["params"]
        sampling = SamplingParams(max_tokens=64)
        request = EngineRequest(
            id=step["id"], prompt=tuple(range(step["prompt"])), sampling=sampling
        )
        one = ActiveRequest(
            request=request,
            attention=Attention(self.pool, 0),
            arrived=step["now"],
            tokens=list(request.prompt),
            salt=0,
            params=dict(params) if params is not None else None,
            chance=random.Random(0),
        )
        self._requests[request.id] = one
        if params is not None:
            self.meet(params)
        self.connector.queued(one)
        return {}

    def schedule(self, step: Step) -> dict[str, Any]:
        """Schedule a request for the first time."""
        one = self._requests[step["id"]]
        one.started, one.scheduled_before = step["now"], True
        one.computed = one.local = step["computed"]
        wanted, later = self.connector.wanted(one)
        if self.connector.blocked:
            self.unblock(one)
            wanted, later = self.connector.wanted(one)
        count = -(-(one.computed + wanted if later else one.prompt) // BLOCK)
        one.blocks = step["blocks"][:count]
        new = len(one.blocks) - one.local // BLOCK
        self.connector.allocated(one, new if wanted else 0, wanted)
        one.state = RequestState.LOADING if later else RequestState.RUNNING
        if not later:
            one.computed = one.prompt
            self.connector.stepped(one, first=True, now=step["now"])
        return {"matched": [wanted, later]}

    def received(self, step: Step) -> dict[str, Any]:
        """Its KV is here."""
        one = self._requests[step["id"]]
        one.state = RequestState.RUNNING
        self.connector.arrived(one.request.id)
        return {}

    def finish(self, step: Step) -> dict[str, Any]:
        """End a request, as `Core.abort` and `Core._end` do."""
        one = self._requests.pop(step["id"])
        one.computed, before = step["computed"], one.state
        self.connector.arrived(one.request.id)
        if before is RequestState.LOADING and step["reason"] == "abort":
            return {"kept": False, "handle": None}
        kept, handle = self.connector.ended(one, step["reason"], step["now"])
        if step["reason"] == "abort" and not one.scheduled_before:
            self.connector.dropped(one.request.id, one.params)
        return {"kept": kept, "handle": handle}

    def wait(self, step: Step) -> dict[str, Any]:
        """Let time pass."""
        return {}

    def _asks(self, now: float) -> list[Any]:
        self.connector.tick(now)
        self.connector.flush()
        found = []
        while self.connector.outbox:
            command = self.connector.outbox.popleft()
            if isinstance(command, Handshake):
                greeting = Greeting(command.peer.engine_id, mode=self.connector.mode)
                assert not self.connector.handshaken(command.peer, greeting)
                self.connector.flush()
            else:
                found.append(self.asked(command))
        return sorted(found, key=str)


def prefilled(pool: BlockPool, request_id: str, blocks: list[int]) -> ActiveRequest:
    """Return a request of P that has just ended."""
    request = EngineRequest(id=request_id, prompt=(1,), sampling=SamplingParams(max_tokens=1))
    params = {"do_remote_decode": True}
    one = ActiveRequest(request, Attention(pool, 0), 0.0, [1], 0, params, None, blocks=blocks)
    one.computed = len(blocks) * BLOCK
    return one


def stats() -> Stats:
    """Return counters that nobody reads."""
    return Stats()
